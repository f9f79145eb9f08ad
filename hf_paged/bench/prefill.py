"""Reading prompts with a whole model: DynamicCache with sdpa against PagedCache with paged attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_paged.bench.decode import (
    DYNAMIC,
    PAGED,
    DecodePoint,
    PointResult,
    random_ids,
    relative_difference,
    share_weights,
    tolerance_of,
)
from hf_paged.bench.harness import Comparison, Order, compare, synchronizer
from hf_paged.models import cache_keyword

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

CPU_TOKENS = 256
"""On a CPU, prompts are as many rows as make at most so many tokens, and at least one: arithmetic is all that counts
there, and more rows only take longer."""


@dataclass(frozen=True)
class PrefillResult(PointResult):
    """What prompts of one shape gave.

    Attributes:
        point: rows and tokens of each.
        comparison: seconds of reading all of them, by side.
        logit_difference: the largest of any side from the first one's logits, relative to the largest logit.
        tolerance: what that may be, for the dtype.
    """

    point: DecodePoint
    comparison: Comparison
    logit_difference: float
    tolerance: float

    def figures(self) -> dict[str, Any]:
        return {
            "prompts": self.comparison.as_dict(),
        }


def measure_prefill(
    model: PreTrainedModel,
    points: Sequence[DecodePoint],
    *,
    block_size: int = 16,
    rounds: int = 7,
    progress: Callable[[str], object] | None = None,
) -> Iterator[PrefillResult]:
    """Time the forward pass that reads prompts, at each of `points`, with fewer rows on a CPU (`CPU_TOKENS`)."""
    from transformers import DynamicCache

    from hf_paged import PagedCache, enable_paged_attention

    twin = share_weights(model)
    enable_paged_attention(twin)
    for point in prefill_points(points, model.device):
        blocks = point.batch * -(-point.length // block_size)
        paged = PagedCache(model.config, block_size=block_size, num_blocks=blocks)
        yield time_prefill(
            {DYNAMIC: model, PAGED: twin},
            {DYNAMIC: lambda: DynamicCache(config=model.config), PAGED: lambda paged=paged: emptied(paged)},
            point,
            rounds=rounds,
            progress=progress,
        )


def prefill_points(points: Sequence[DecodePoint], device: torch.device) -> list[DecodePoint]:
    """The shapes in which prompts are read for `points`, each once."""
    return list(dict.fromkeys(prefill_point(point, device) for point in points))


def prefill_point(point: DecodePoint, device: torch.device) -> DecodePoint:
    if device.type != "cpu":
        return point
    return DecodePoint(min(point.batch, max(1, CPU_TOKENS // point.length)), point.length)


def emptied(cache: Cache) -> Cache:
    """The same cache without its tokens; its memory stays."""
    cache.reset()
    return cache


def time_prefill(
    models: Mapping[str, PreTrainedModel],
    empty_caches: Mapping[str, Callable[[], Cache]],
    point: DecodePoint,
    *,
    rounds: int,
    order: Order | None = None,
    progress: Callable[[str], object] | None = None,
) -> PrefillResult:
    """Time the forward pass that reads prompts of random tokens, of each side in turn; the first is the baseline.

    Args:
        empty_caches: give a cache without tokens; called within the time that is taken.
    """
    baseline = next(iter(empty_caches))
    model = models[baseline]
    ids = random_ids(model, tuple(point))
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(point.length, device=ids.device)[None],
        "use_cache": True,
        "logits_to_keep": 1,
    }
    logits: dict[str, torch.Tensor] = {}  # [rows, 1, vocabulary] each

    @torch.no_grad()
    def read(name: str) -> None:
        cache = {cache_keyword(models[name]): empty_caches[name]()}
        logits[name] = models[name](**inputs, **cache).logits

    comparison = compare(
        {name: lambda name=name: read(name) for name in empty_caches},
        repeats=rounds,
        order=order,
        sync=synchronizer(model.device),
        progress=lambda text: progress(f"prefill {point}: {text}") if progress else None,
    )
    difference = max(relative_difference(got, logits[baseline]) for got in logits.values())
    return PrefillResult(point, comparison, difference, tolerance_of(model))
