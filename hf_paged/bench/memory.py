"""The bytes that a ragged batch takes: blocks in use at the peak against the bytes of the real tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_paged.models import cache_keyword

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

LENGTHS = tuple(round(30 + 970 * i / 15) for i in range(16))
"""16 prompts of 30 to 1,000 tokens, 515 on average."""
QUICK_LENGTHS = LENGTHS[::5]

TARGET = 0.04
"""The most that blocks in use may take above the bytes of the real tokens."""


@dataclass(frozen=True)
class MemoryResult:
    """Bytes of keys and values after the prompts and `steps` new tokens a row.

    Attributes:
        tokens: real tokens over all rows, padding not counted.
        token_bytes: what they take.
        paged_bytes: blocks in use at the peak.
        dynamic_bytes: DynamicCache's tensors, padding included.
    """

    lengths: tuple[int, ...]
    steps: int
    block_size: int
    tokens: int
    token_bytes: int
    paged_bytes: int
    dynamic_bytes: int

    @property
    def paged_overhead(self) -> float:
        """Bytes above those of the real tokens, as a share of these."""
        return self.paged_bytes / self.token_bytes - 1

    @property
    def dynamic_overhead(self) -> float:
        return self.dynamic_bytes / self.token_bytes - 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "lengths": list(self.lengths),
            "steps": self.steps,
            "block_size": self.block_size,
            "tokens": self.tokens,
            "token_bytes": self.token_bytes,
            "paged_bytes": self.paged_bytes,
            "dynamic_bytes": self.dynamic_bytes,
            "paged_overhead": self.paged_overhead,
            "dynamic_overhead": self.dynamic_overhead,
        }


def measure_memory(
    model: PreTrainedModel,
    lengths: Sequence[int] = LENGTHS,
    *,
    steps: int = 4,
    block_size: int = 16,
    progress: Callable[[str], object] | None = None,
) -> MemoryResult:
    """Generate `steps` tokens for prompts of `lengths` random tokens with both caches, and count what they hold."""
    from transformers import DynamicCache

    from hf_paged import PagedCache, paged_attention

    say = progress or (lambda text: None)
    say(f"memory: {len(lengths)} ragged rows with PagedCache")
    blocks = sum(-(-(length + steps) // block_size) for length in lengths)
    paged = PagedCache(model.config, block_size=block_size, num_blocks=blocks)
    with paged_attention(model):
        _generate(model, paged, lengths, steps)
    say(f"memory: {len(lengths)} ragged rows with DynamicCache")
    dynamic = DynamicCache(config=model.config)
    _generate(model, dynamic, lengths, steps)
    stats = paged.stats()
    return MemoryResult(
        lengths=tuple(lengths),
        steps=steps,
        block_size=block_size,
        tokens=stats.tokens,
        token_bytes=stats.token_bytes,
        paged_bytes=stats.peak_bytes,
        dynamic_bytes=dynamic_bytes(dynamic),
    )


def dynamic_bytes(cache: Cache) -> int:
    """Bytes of keys and values that a DynamicCache or a StaticCache holds; states of recurrent layers are none."""
    tensors = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(t.nbytes for t in tensors if t is not None)


def _generate(model: PreTrainedModel, cache: Cache, lengths: Sequence[int], steps: int) -> None:
    """Left-padded prompts of random tokens; the last of the new tokens is not stored, as always in generate()."""
    longest = max(lengths)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.get_text_config().vocab_size, (len(lengths), longest), generator=generator)
    mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()  # [rows, longest]
    model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        **{cache_keyword(model): cache},
    )
