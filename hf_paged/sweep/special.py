"""What a tiny config needs that no rule gives: attributes by model type or class, `"part."` for those of a part."""

from __future__ import annotations

from typing import Any

ATTRIBUTES: dict[str, dict[str, Any]] = {}

COMPOSED: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "encoder-decoder": {
        "encoder": ("bert", {}),
        "decoder": ("bert", {"is_decoder": True, "add_cross_attention": True}),
    },
    "vision-encoder-decoder": {
        "encoder": ("vit", {}),
        "decoder": ("gpt2", {"is_decoder": True, "add_cross_attention": True}),
    },
    "speech-encoder-decoder": {
        "encoder": ("wav2vec2", {"conv_dim": (32, 32), "conv_kernel": (10, 3), "conv_stride": (5, 2)}),
        "decoder": ("bert", {"is_decoder": True, "add_cross_attention": True}),
    },
}
"""Types whose config is put together from two others: the type and attributes of each part."""
