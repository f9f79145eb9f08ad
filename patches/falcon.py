"""Falcon: rotary positions or ALiBi, and one, some or all heads of keys and values.

Falcon's ALiBi is rounded to bfloat16 also where the model is in float32. The kernel has the slopes alone. In half
precision that is one rounding more or less; in float32 the kernel is used where nothing is rounded, and elsewhere the
dense way with the model's own bias, so that the tokens stay the model's.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

from hf_paged.patches.families import Family, alibi_slopes, attend, takes_over

EXACT_LENGTH = 256
"""Positions up to which bfloat16 holds every whole number."""


def attention_forward(
    self: Any,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not takes_over(layer_past, attention_mask):
        return type(self).forward(
            self,
            hidden_states,
            alibi,
            attention_mask,
            position_ids,
            layer_past,
            use_cache,
            output_attentions,
            position_embeddings,
            **kwargs,
        )
    query, key, value = _split(self, self.query_key_value(hidden_states), layer_past)
    options = {"scaling": self.inv_norm_factor, "output_attentions": output_attentions}
    if alibi is None:
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    else:
        # With `eager` the model adds ALiBi to the scores although its mask has it already. (With `sdpa` it does so only
        # where weights are asked for; here asking changes nothing.)
        times = 1 if self.config._attn_implementation == "sdpa" else 2
        options |= _alibi_options(self, alibi, query, times * self.inv_norm_factor)
        options["dropout"] = self.attention_dropout.p
    output, weights = attend(self, layer_past, self.layer_idx, query, key, value, **options)
    return self.dense(output), weights


def _split(module: Any, fused: torch.Tensor, cache: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, `[rows, heads or kv_heads, q_len, head_dim]`. The model repeats keys and values for all
    heads of a group before it stores them; here they are stored once, unless the cache has them otherwise."""
    if not module.new_decoder_architecture:
        query, key, value = module._split_heads(fused)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    rows, q_len, _ = fused.shape
    group_size = module.num_heads // module.num_kv_heads
    groups = fused.view(rows, q_len, module.num_kv_heads, group_size + 2, module.head_dim)
    query = groups[:, :, :, :-2].flatten(2, 3).transpose(1, 2)
    key, value = (groups[:, :, :, place].transpose(1, 2) for place in (-2, -1))
    storage = getattr(cache.layers[module.layer_idx], "storage", None)
    if storage is not None and storage.key_blocks.shape[1] == module.num_heads != module.num_kv_heads:
        key, value = (tensor.repeat_interleave(group_size, dim=1) for tensor in (key, value))
    return query, key, value


def _alibi_options(module: Any, alibi: torch.Tensor, query: torch.Tensor, factor: float) -> dict[str, torch.Tensor]:
    """
    Args:
        alibi: `[rows * heads, 1, length]`, the model's own.
        factor: multiplies ALiBi, as Falcon scales it with the scores.
    """
    heads, rows = module.num_heads, query.shape[0]
    is_rounded = alibi.shape[-1] > EXACT_LENGTH or heads not in (1, 2, 4, 8)
    if query.dtype == torch.float32 and is_rounded:
        return {"position_bias": alibi.view(rows, heads, 1, -1) * factor}
    return {"alibi_slopes": alibi_slopes(heads, query.device, rounded_to=torch.bfloat16) * factor}


def _eager_because(config: Any) -> str | None:
    return "the model makes its ALiBi as long as the cache, which no graph can know" if config.alibi else None


FAMILY = Family(
    forwards={"FalconAttention": attention_forward},
    signatures={
        "FalconAttention": (
            *("hidden_states", "alibi", "attention_mask", "position_ids", "layer_past", "use_cache"),
            *("output_attentions", "position_embeddings", "kwargs"),
        )
    },
    eager_because=_eager_because,
)
