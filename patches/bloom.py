"""Bloom: ALiBi, and the residual added within the attention module."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.bloom import modeling_bloom

from hf_paged.patches.families import Family, alibi_slopes, attend, takes_over


def attention_forward(
    self: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    alibi: torch.Tensor,
    attention_mask: torch.Tensor | None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not takes_over(layer_past, attention_mask):
        return type(self).forward(
            self, hidden_states, residual, alibi, attention_mask, layer_past, use_cache, output_attentions, **kwargs
        )
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    output, weights = attend(
        self,
        layer_past,
        self.layer_idx,
        query,
        key,
        value,
        dropout=self.attention_dropout.p,
        scaling=self.inv_norm_factor,
        alibi_slopes=alibi_slopes(self.num_heads, query.device),
        output_attentions=output_attentions,
    )
    output = torch.nn.functional.dropout(self.dense(output), self.hidden_dropout, self.training)
    return residual + output, weights


def _refuses(module: Any) -> str | None:
    if module.pretraining_tp > 1 and module.slow_but_exact:
        return "its config says slow_but_exact"
    return None


def _eager_because(config: Any) -> str | None:
    if hasattr(modeling_bloom, "_get_alibi_slopes"):
        return None
    return "in this version the model makes its ALiBi as long as the cache, which no graph can know"


FAMILY = Family(
    forwards={"BloomAttention": attention_forward},
    signatures={
        "BloomAttention": (
            *("hidden_states", "residual", "alibi", "attention_mask", "layer_past", "use_cache", "output_attentions"),
            "kwargs",
        )
    },
    refuses=_refuses,
    eager_because=_eager_because,
)
