"""GPT-Neo: scores that are not scaled, and local layers, whose window is the module's: their cache layers have none."""

from __future__ import annotations

from typing import Any

import torch

from hf_paged.patches.families import Family, attend, takes_over


def attention_forward(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not takes_over(layer_past, attention_mask):
        return type(self).forward(
            self, hidden_states, attention_mask, layer_past, use_cache, output_attentions, **kwargs
        )
    query, key, value = (
        self._split_heads(project(hidden_states), self.num_heads, self.head_dim)
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    output, weights = attend(
        self,
        layer_past,
        self.layer_id,
        query,
        key,
        value,
        dropout=self.attn_dropout.p,
        scaling=1.0,
        local_window=self.config.window_size if self.attention_type == "local" else None,
        output_attentions=output_attentions,
    )
    return self.resid_dropout(self.out_proj(output)), weights


FAMILY = Family(
    forwards={"GPTNeoSelfAttention": attention_forward},
    signatures={
        "GPTNeoSelfAttention": (
            *("hidden_states", "attention_mask", "layer_past", "use_cache", "output_attentions", "kwargs"),
        )
    },
)
