"""MPT: ALiBi, clipped projections, and a block that does not tell its attention whether weights are asked for."""

from __future__ import annotations

import threading
from typing import Any

import torch

from hf_paged.patches.families import Family, attend, takes_over

_asked = threading.local()


def block_forward(self: Any, *args: Any, output_attentions: bool = False, **kwargs: Any) -> Any:
    """The block's own, which leaves a note for `attention_forward`."""
    before = getattr(_asked, "output_attentions", False)
    _asked.output_attentions = bool(output_attentions)
    try:
        return type(self).forward(self, *args, output_attentions=output_attentions, **kwargs)
    finally:
        _asked.output_attentions = before


def attention_forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_bias: torch.Tensor,
    cache: Any = None,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    cache = past_key_values if cache is None else cache  # its name up to transformers 5.17
    if not takes_over(cache, attention_mask) or position_bias is None:
        return type(self).forward(self, hidden_states, position_bias, cache, attention_mask, **kwargs)
    fused = self.Wqkv(hidden_states)
    if self.clip_qkv:
        fused = fused.clamp(-self.clip_qkv, self.clip_qkv)
    heads = fused.unflatten(2, (3, self.n_heads, self.head_dim))  # [rows, q_len, 3, heads, head_dim]
    query, key, value = (heads[:, :, part].transpose(1, 2) for part in range(3))
    output, weights = attend(
        self,
        cache,
        self.layer_idx,
        query,
        key,
        value,
        dropout=self.attn_dropout_p,
        scaling=self.softmax_scale,
        # The bias is `[heads, 1, max_seq_len]`: the slopes times the distances from the last position.
        alibi_slopes=(position_bias[:, 0, -1] - position_bias[:, 0, -2]).float(),
        output_attentions=getattr(_asked, "output_attentions", False),
    )
    return self.out_proj(output), weights


FAMILY = Family(
    forwards={"MptAttention": attention_forward, "MptBlock": block_forward},
    signatures={
        "MptAttention": ("hidden_states", "position_bias", "cache", "attention_mask", "kwargs"),
        "MptBlock": (
            *("hidden_states", "position_bias", "attention_mask", "layer_past", "use_cache", "output_attentions"),
            "kwargs",
        ),
    },
    takes_none=False,
)
