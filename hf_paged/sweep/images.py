"""Images for models that can do without: the forms that a config may mean, for the model itself to choose from."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

MOST = 80
"""Tokens of one image, so that prompt, image and answer stay below the lengths that tiny models know."""


def with_images(model: PreTrainedModel, text: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The prompts with an image before each, in every form that the model makes features of. There are as many image
    tokens as features. Whether generate() takes it so is yet to be tried."""
    config = model.config
    token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    find = getattr(model, "get_image_features", None)
    if config.is_encoder_decoder or token is None or find is None or getattr(config, "vision_config", None) is None:
        return
    rows = len(text["input_ids"])
    parameters = inspect.signature(model.forward).parameters
    for images in _forms(config, rows):
        count = 0
        with contextlib.suppress(Exception):  # it is not of this form
            count, rest = divmod(_count(find(**images)), rows)
            if rest or count > MOST:
                continue
        if count:
            inputs = _prompts(text, token, count, getattr(config, "vision_start_token_id", None))
            for name in ("token_type_ids", "mm_token_type_ids"):
                if name in parameters:
                    inputs[name] = (inputs["input_ids"] == token).long()
            yield inputs | images


def other_images(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same with other images."""
    return inputs | {"pixel_values": inputs["pixel_values"].flip(-1)}


def _forms(config: Any, rows: int) -> Iterator[dict[str, Any]]:
    vision = config.vision_config
    size, patch = getattr(vision, "image_size", None), getattr(vision, "patch_size", None)
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", 3)
    generator = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    if isinstance(patch, int):
        grid = torch.tensor([[1, 4, 4]] * rows)
        for frames in (1, 2):
            yield {"pixel_values": noise(rows * 16, channels * frames * patch * patch), "image_grid_thw": grid}
        yield {"pixel_values": noise(rows * 16, channels, patch, patch), "image_grid_thw": grid}
    size = size[0] if isinstance(size, list | tuple) else size or 4 * (patch if isinstance(patch, int) else 8)
    sizes = torch.tensor([[size, size]] * rows)
    yield {"pixel_values": noise(rows, channels, size, size)}
    yield {"pixel_values": noise(rows, channels, size, size), "image_sizes": sizes}
    yield {"pixel_values": noise(rows, 1, channels, size, size)}  # several images a row
    yield {"pixel_values": noise(rows, 5, channels, size, size), "image_sizes": sizes}  # the whole, and tiles of it


def _count(features: Any) -> int:
    features = getattr(features, "pooler_output", features)
    if isinstance(features, list | tuple):
        return sum(map(_count, features))
    return features.numel() // features.shape[-1]


def _prompts(text: dict[str, Any], token: int, count: int, start: int | None) -> dict[str, Any]:
    """Each row's image between padding and text."""
    image = torch.tensor(([] if start is None else [start]) + [token] * count)
    rows = [
        torch.cat((ids[mask == 0], image, ids[mask == 1]))
        for ids, mask in zip(text["input_ids"], text["attention_mask"], strict=True)
    ]
    more = torch.ones(len(rows), len(image), dtype=torch.long)
    return {"input_ids": torch.stack(rows), "attention_mask": torch.cat((text["attention_mask"], more), 1)}
