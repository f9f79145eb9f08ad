"""What a tiny model is given: three prompts, and noise for encoders that listen or look."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_paged.sweep.tiny import FIRST_SPECIAL

LENGTHS = (5, 9, 12)
FIRST, END = 3, FIRST_SPECIAL - 10
"""The ids of prompts: below those of images and sounds, above those of padding and beginnings."""
SEES = ("blip", "blip-2", "instructblip", "instructblipvideo", "idefics")
"""Types that do not generate without an image."""
HEARS = ("kyutai_speech_to_text", "voxtral_realtime")
"""Types without an encoder's prompt that do not generate without sound."""


def prompts(model: PreTrainedModel) -> dict[str, Any]:
    """Three rows of different lengths, padded on the left, as generate() takes them; the decoder of an encoder-decoder
    model goes on from four tokens."""
    generator = torch.Generator().manual_seed(1)
    config = model.config
    end = _end(model)
    ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows_of_text(model, generator)):
        ids[row, -len(tokens) :] = tokens
        mask[row, -len(tokens) :] = 1
    text = {"input_ids": ids, "attention_mask": mask}
    if config.model_type in SEES:
        return text | _image(model, text, generator)
    if config.model_type in HEARS:
        return text | _sound(model, generator)
    if type(model).__name__.startswith("Musicgen"):  # a row for each codebook, and no padding
        ids = torch.randint(FIRST, end, (len(LENGTHS) * config.num_codebooks, max(LENGTHS)), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(mask)}
    if not config.is_encoder_decoder:
        return text
    channels = (config.get_text_config(decoder=True).num_channels,) if config.model_type == "dia" else ()
    decoder = {"decoder_input_ids": torch.randint(FIRST, end, (len(LENGTHS), 4, *channels), generator=generator)}
    if channels:
        decoder["decoder_attention_mask"] = torch.ones(len(LENGTHS), 4, dtype=torch.long)
    if config.model_type == "udop":
        text["bbox"] = torch.rand(len(LENGTHS), max(LENGTHS), 4, generator=generator)
    if config.model_type == "pop2piano":
        return {"input_features": torch.randn(len(LENGTHS), 32, config.d_model, generator=generator)} | decoder
    if model.main_input_name == "input_ids":
        return text | decoder
    return _heard(model, generator) | decoder


def rows_of_text(model: PreTrainedModel, generator: torch.Generator | None = None) -> list[torch.Tensor]:
    """The tokens of each prompt, unpadded."""
    generator = generator or torch.Generator().manual_seed(1)
    return [torch.randint(FIRST, _end(model), (length,), generator=generator) for length in LENGTHS]


def _end(model: PreTrainedModel) -> int:
    return min(END, getattr(model.config.get_text_config(decoder=True), "vocab_size", END))


def other_prompts(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same with another token before the last."""
    changed = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    ids = changed["decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"]
    ids[:, -2] = torch.where(ids[:, -2] > FIRST, ids[:, -2] - 1, ids[:, -2] + 1)
    return changed


def _image(model: PreTrainedModel, text: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
    config, rows = model.config, len(LENGTHS)
    size = config.vision_config.image_size
    images = torch.randn(rows, 3, size, size, generator=generator)
    if config.model_type == "idefics":
        seen = torch.ones(rows, max(LENGTHS), 1, dtype=torch.long)
        return {"pixel_values": images[:, None], "image_attention_mask": seen}
    found: dict[str, Any] = {"pixel_values": images}
    if config.model_type == "instructblipvideo":
        found["pixel_values"] = images[:, None].repeat(1, 4, 1, 1, 1)
    if config.model_type.startswith("instruct"):
        found |= {"qformer_input_ids": text["input_ids"], "qformer_attention_mask": text["attention_mask"]}
    if config.model_type != "blip":
        frames = 4 if config.model_type == "instructblipvideo" else 1
        token = config.video_token_index if frames > 1 else config.image_token_index
        image = torch.full((rows, config.num_query_tokens * frames), token)
        found["input_ids"] = torch.cat((image, text["input_ids"]), 1)
        found["attention_mask"] = torch.cat((torch.ones_like(image), text["attention_mask"]), 1)
    return found


def _sound(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    if model.config.model_type == "kyutai_speech_to_text":
        return {"input_values": torch.randn(len(LENGTHS), 1, 4000, generator=generator)}
    bins, frames = model.config.audio_config.num_mel_bins, 32 * model.config.audio_length_per_tok
    return {"input_features": torch.randn(len(LENGTHS), bins, frames, generator=generator)}


def _heard(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    config, name, rows = model.config, model.main_input_name, len(LENGTHS)
    if name == "pixel_values":
        vision = getattr(config, "vision_config", None) or getattr(config, "encoder", config)
        size = getattr(vision, "image_size", 32)
        shape = (rows, getattr(vision, "num_channels", 3), *((size, size) if isinstance(size, int) else size))
    elif name == "flattened_patches":
        shape = (rows, 9, config.vision_config.patch_embed_hidden_size + 2)
    elif name == "input_features":
        encoder = getattr(config, "encoder_config", None) or config
        bins = getattr(encoder, "num_mel_bins", None) or getattr(encoder, "input_feat_per_channel", 80)
        bins = getattr(config, "feature_projection_input_dim", bins)
        length = 2 * getattr(encoder, "max_source_positions", 32)
        shape = (rows, bins, length) if config.model_type == "whisper" else (rows, length, bins)
    else:
        shape = (rows, 4000)
    noise = torch.randn(shape, generator=generator)
    if name == "flattened_patches":  # each begins with the row and the column that it is from
        noise[..., :2] = torch.cartesian_prod(torch.arange(1, 4), torch.arange(1, 4))
    return {name: noise}
