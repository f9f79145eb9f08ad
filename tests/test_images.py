"""Vision-language models with images: prefixes and image blocks that are seen both ways get their real masks."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from helpers import CACHE_ARGUMENT, WAYS, check_books, pad_left, run_way
from transformers import DynamicCache, PreTrainedModel

from hf_paged import PagedCache
from hf_paged.sweep.tiny import build

MODELS = {
    "gemma3": "Gemma3ForConditionalGeneration",  # image blocks are seen both ways, layers have windows
    "paligemma": "PaliGemmaForConditionalGeneration",  # the prompt is a prefix that is seen both ways
    "llava": "LlavaForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",  # positions in three dimensions
}
IMAGE_TOKENS = {"gemma3": 4, "paligemma": 16, "llava": 16, "qwen2_vl": 4}
TEXTS = (3, 8)  # tokens behind the image


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    model = build(request.param, MODELS[request.param], "IMAGE_TEXT_TO_TEXT")
    for name, parameter in model.named_parameters():
        if name.endswith("mm_input_projection_weight"):  # zeros at first, by which no image would be seen
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    return model


def prompts(model: PreTrainedModel) -> dict[str, Any]:
    """Two rows with an image each, left-padded; three tokens, the image, and text."""
    generator = torch.Generator().manual_seed(2)
    kind, config = model.config.model_type, model.config
    image_token = getattr(config, "image_token_id", None) or config.image_token_index
    image = torch.full((IMAGE_TOKENS[kind],), image_token)

    def text(count: int) -> torch.Tensor:
        return torch.randint(3, 150, (count,), generator=generator)

    ids, mask = pad_left([torch.cat((text(3), image, text(count))) for count in TEXTS])
    inputs = {"input_ids": ids, "attention_mask": mask}
    size = getattr(config.vision_config, "image_size", None)
    if kind == "qwen2_vl":
        inputs["pixel_values"] = torch.randn(2 * 16, 3 * 2 * 14 * 14, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * 2)
    else:
        inputs["pixel_values"] = torch.randn(2, 3, size, size, generator=generator)
    if kind in ("gemma3", "paligemma"):
        inputs["token_type_ids"] = (ids == image_token).long()
    elif "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        inputs["mm_token_type_ids"] = (ids == image_token).long()
    return inputs


def run(model: PreTrainedModel, cache: Any, **options: Any) -> Any:
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    } | options
    with torch.no_grad():
        return model.generate(**prompts(model), **{CACHE_ARGUMENT: cache}, **options)


@pytest.mark.parametrize("way", [*WAYS, "compiled"])
def test_images_are_seen_as_with_the_ordinary_cache(model: PreTrainedModel, way: str) -> None:
    want = run(model, DynamicCache(config=model.config))
    cache = PagedCache(model.config)
    with run_way(model, way):
        got = run(model, cache)
    check_books(cache)
    assert torch.equal(got.sequences, want.sequences)
    for ours, theirs in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_the_images_matter(model: PreTrainedModel) -> None:
    """Otherwise the test above shows nothing of them."""
    want = run(model, DynamicCache(config=model.config)).logits[0]
    inputs = prompts(model)
    inputs["pixel_values"] = inputs["pixel_values"].flip(0)
    options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    with torch.no_grad():
        other = model.generate(**inputs, **options).logits[0]
    assert not torch.allclose(want, other, atol=1e-2)


@pytest.mark.parametrize("way", ["plain", "cpu"])
def test_beams_over_images(model: PreTrainedModel, way: str) -> None:
    want = run(model, DynamicCache(config=model.config), num_beams=3)
    with run_way(model, way):
        got = run(model, PagedCache(model.config), num_beams=3)
    assert torch.equal(got.sequences, want.sequences)
