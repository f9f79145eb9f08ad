"""Which block size for this model on this machine: decode, prefill, memory and waste by block size.

`measure_block_sizes` times all sizes against each other and against transformers' caches; `recommend` says what follows
from the measurements, and how sure that is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from hf_paged.bench.decode import (
    DYNAMIC,
    DecodePoint,
    PointResult,
    prefill,
    random_ids,
    room_of,
    share_weights,
    time_steps,
    tolerance_of,
)
from hf_paged.bench.harness import Comparison, Ratio, shuffled
from hf_paged.bench.memory import dynamic_bytes
from hf_paged.bench.prefill import PrefillResult, emptied, prefill_point, time_prefill
from hf_paged.models import cache_keyword

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

STATIC = "static"
AGAIN = "smallest again"
"""The smallest size a second time, as a side of its own: what differs between the two is chance."""
SIZES = (16, 32, 64, 128, 256)
POINTS = (DecodePoint(1, 1024), DecodePoint(8, 1024))
QUICK_POINTS = (DecodePoint(4, 256),)

WORTH = 0.05
"""A size that is faster by less is not worth a change."""
ENOUGH_ROUNDS = 5
"""With fewer, nothing is sure."""


@dataclass(frozen=True)
class BlockSizePoint(PointResult):
    """What one point gave, with every block size and with transformers' caches: the sides are called by the block size
    as a string, `DYNAMIC`, `STATIC` and `AGAIN`.

    Attributes:
        steps: seconds of one decode step, by side.
        prefill: the same for reading prompts, which may be fewer rows than the point's.
        kv_bytes: by side, of keys and values at the end of the decode steps, when they are most: blocks in use,
            DynamicCache's tensors, and StaticCache's, which is as long as its rows become.
        logit_difference: the largest of any side from DynamicCache's logits, relative to the largest logit.
        tolerance: what that may be, for the dtype.
    """

    point: DecodePoint
    steps: Comparison
    prefill: PrefillResult
    kv_bytes: Mapping[str, int]
    logit_difference: float
    tolerance: float

    def figures(self) -> dict[str, Any]:
        return {
            "step": self.steps.as_dict(),
            "kv_bytes": dict(self.kv_bytes),
        }


class Verdict(StrEnum):
    STAY = "stay"
    CHANGE = "change"
    UNSURE = "unsure"


@dataclass(frozen=True)
class Recommendation:
    """What follows from measurements.

    Attributes:
        block_size: to use: the smallest one, unless another is surely better.
        text: why, and how sure that is.
    """

    verdict: Verdict
    block_size: int
    text: str

    def as_dict(self) -> dict[str, Any]:
        return {"verdict": self.verdict.value, "block_size": self.block_size, "text": self.text}


@dataclass(frozen=True)
class BlockSizesResult:
    """All that was measured.

    Attributes:
        sizes: tokens a block, ascending. The others are compared with the smallest, which wastes least.
        without_static: why StaticCache is no side; None if it is one.
    """

    sizes: tuple[int, ...]
    points: tuple[BlockSizePoint, ...]
    without_static: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether all sides computed the same everywhere."""
        return all(result.agrees for result in (*self.points, *self.prefills))

    @property
    def prefills(self) -> list[PrefillResult]:
        """Prompts of each shape once, as points may share them."""
        return list({result.prefill.point: result.prefill for result in self.points}.values())

    @property
    def lengths(self) -> list[int]:
        """Lengths of the points, each once."""
        return list(dict.fromkeys(result.point.length for result in self.points))

    @property
    def waste(self) -> dict[int, float]:
        """By size, the mean of `block_waste` over `lengths`."""
        return {size: statistics.fmean(block_waste(n, size) for n in self.lengths) for size in self.sizes}

    @cached_property
    def decode_gains(self) -> dict[int, Ratio]:
        """By size, over all points; that of the smallest is chance."""
        return gains([result.steps for result in self.points], self.sizes)

    @cached_property
    def prefill_gains(self) -> dict[int, Ratio]:
        """The same for prompts."""
        return gains([result.comparison for result in self.prefills], self.sizes)

    @property
    def recommendation(self) -> Recommendation:
        return recommend(self.decode_gains, self.prefill_gains, self.waste)

    def as_dict(self) -> dict[str, Any]:
        both = {"decode": self.decode_gains, "prefill": self.prefill_gains}
        return {
            "sizes": list(self.sizes),
            "without_static": self.without_static,
            "decode": [result.as_dict() for result in self.points],
            "prefill": [result.as_dict() for result in self.prefills],
            "times_as_fast_as_smallest": {
                name: {str(size): ratio.as_dict() for size, ratio in found.items()} for name, found in both.items()
            },
            "waste": [
                {"length": n, "padded": padded_waste(n), **{str(size): block_waste(n, size) for size in self.sizes}}
                for n in self.lengths
            ],
            "recommendation": self.recommendation.as_dict(),
        }


def measure_block_sizes(
    model: PreTrainedModel,
    points: Sequence[DecodePoint] = POINTS,
    sizes: Sequence[int] = SIZES,
    *,
    rounds: int = 9,
    steps: int = 4,
    progress: Callable[[str], object] | None = None,
) -> BlockSizesResult:
    """Time decode steps and prompts at each of `points` with blocks of each size, with DynamicCache and with
    StaticCache (not compiled), all in turn, by lot. The smallest size takes
    part twice.

    Args:
        rounds: how often each side is timed.
        steps: decode steps in one timing.
    """
    from transformers import DynamicCache, StaticCache

    from hf_paged import PagedCache, enable_paged_attention

    say = progress or (lambda text: None)
    sizes = tuple(sorted(set(sizes)))
    paged = share_weights(model)
    enable_paged_attention(paged)
    block_sizes = {str(size): size for size in sizes} | {AGAIN: sizes[0]}
    without_static = _why_no_static_cache(model)
    models = {DYNAMIC: model, STATIC: model} | dict.fromkeys(block_sizes, paged)

    def make_caches(batch: int, length: int) -> dict[str, Cache]:
        caches: dict[str, Cache] = {DYNAMIC: DynamicCache(config=model.config)}
        if not without_static:
            caches[STATIC] = StaticCache(config=model.config, max_cache_len=length)
        for name, size in block_sizes.items():
            caches[name] = PagedCache(model.config, block_size=size, num_blocks=batch * -(-length // size))
        return caches

    prefills: dict[DecodePoint, PrefillResult] = {}
    for point in points:
        shape = prefill_point(point, model.device)
        if shape not in prefills:
            empty = {name: partial(emptied, cache) for name, cache in make_caches(*shape).items()}
            empty[DYNAMIC] = partial(DynamicCache, config=model.config)  # it keeps no memory
            prefills[shape] = time_prefill(
                models,
                empty,
                shape,
                rounds=rounds,
                order=shuffled,
                progress=lambda text: say(f"block sizes, {text}"),
            )
    say(f"prefill of {max(point.length for point in points):,} tokens")
    prefix = prefill(model, max(point.length for point in points))
    results = []
    for point in points:
        caches = make_caches(point.batch, point.length + room_of(rounds, steps))
        comparison, difference = time_steps(
            models,
            caches,
            prefix,
            point,
            rounds=rounds,
            steps=steps,
            order=shuffled,
            progress=lambda text, point=point: say(f"block sizes, decode {point}: {text}"),
        )
        kv_bytes = {
            name: cache.stats().peak_bytes if isinstance(cache, PagedCache) else dynamic_bytes(cache)
            for name, cache in caches.items()
        }
        prefilled = prefills[prefill_point(point, model.device)]
        results.append(BlockSizePoint(point, comparison, prefilled, kv_bytes, difference, tolerance_of(model)))
    return BlockSizesResult(sizes, tuple(results), without_static)


def _why_no_static_cache(model: PreTrainedModel) -> str | None:
    """What this model says of a StaticCache that is longer than its rows (as those with ALiBi do); None if it runs."""
    from transformers import StaticCache

    try:
        ids = random_ids(model, (1, 3))
        cache = {cache_keyword(model): StaticCache(config=model.config, max_cache_len=8)}
        with torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, **cache)
    except Exception as error:  # whatever a model's code raises
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return None


def gains(comparisons: Sequence[Comparison], sizes: Sequence[int]) -> dict[int, Ratio]:
    """The gain of each size over the smallest; for the smallest itself, that of its second side."""
    smallest = min(sizes)
    sides = {size: AGAIN if size == smallest else str(size) for size in sizes}
    return {size: gain(comparisons, side, str(smallest)) for size, side in sides.items()}


def gain(comparisons: Sequence[Comparison], side: str, baseline: str) -> Ratio:
    """How many times as fast `side` is as `baseline`: for each round, the geometric mean over `comparisons`."""
    rounds = zip(*(comparison.ratio(side, baseline).values for comparison in comparisons), strict=True)
    return Ratio(side, baseline, tuple(statistics.geometric_mean(values) for values in rounds))


def ragged_lengths(length: int) -> list[int]:
    """256 lengths from half of `length` to half as much again, evenly: rows of a batch as they come."""
    return [max(1, round(length * (0.5 + i / 255))) for i in range(256)]


def block_waste(length: int, block_size: int) -> float:
    """Share of the slots of ragged rows around `length` that hold no token: the unfilled ends of their blocks."""
    lengths = ragged_lengths(length)
    return 1 - sum(lengths) / sum(-(-n // block_size) * block_size for n in lengths)


def padded_waste(length: int) -> float:
    """The same where all rows are as long as the longest, as in DynamicCache, and at the least in StaticCache."""
    lengths = ragged_lengths(length)
    return 1 - sum(lengths) / (max(lengths) * len(lengths))


def recommend(decode: Mapping[int, Ratio], prefill: Mapping[int, Ratio], waste: Mapping[int, float]) -> Recommendation:
    """Which block size the measurements speak for.

    The smallest size wastes least, so another one must be shown to be better:

    1. It is *not sure* with fewer than `ENOUGH_ROUNDS` rounds, or where the smallest size, measured twice, differs from
       itself so that a quartile is off by 5 % (`WORTH`) or more: then any difference may be chance.
    2. A size is *faster* in decode or in prefill if its median gain is at least 5 % and the lower quartile of its gains
       is above 1. It is *slower* if the same is true the other way round.
    3. To change to it is right if it is faster in one of the two and slower in neither, and if the gain is more than
       what it adds to the memory of the same tokens. Gains in decode go before those in prefill. Among several such
       sizes it is the smallest whose median reaches the lower quartile of the fastest.
    4. Where there is none, it is not sure either if the quartiles of a size that may be right reach from 1 or less to
       more than such a gain: the spread hides what is looked for.
    5. Else one stays with the smallest.

    Args:
        decode, prefill: gains by size, as `gains` gives them.
        waste: by size, share of slots without a token.
    """
    smallest = min(waste)
    phases = {"decode": decode, "prefill": prefill}
    rounds = min(len(found[smallest].values) for found in phases.values())
    others = sorted(size for size in waste if size != smallest)
    if not others:
        return Recommendation(Verdict.STAY, smallest, f"Stay with {smallest}: no other size was measured.")
    if rounds < ENOUGH_ROUNDS:
        return _unsure(smallest, f"{_rounds(rounds)} cannot tell a difference from chance", rounds)
    for phase, found in phases.items():
        low, high = found[smallest].quartiles
        if max(1 / low, high) >= 1 + WORTH:
            why = f"even blocks of {smallest} against themselves are {_range(found[smallest])} times as fast in {phase}"
            return _unsure(smallest, f"{why} ({_rounds(rounds)})", rounds)

    allowed = [size for size in others if not any(_is_slower(found[size]) for found in phases.values())]
    dear = None  # a phase and a size that is faster, but not by as much as it adds to memory
    for phase, found in phases.items():
        faster = [size for size in allowed if _is_faster(found[size])]
        right = [size for size in faster if found[size].median - 1 > _added(waste, size)]
        if right:
            fastest = found[max(right, key=lambda size: found[size].median)]
            chosen = min(size for size in right if found[size].median >= fastest.quartiles[0])
            other = next(name for name in phases if name != phase)
            text = (
                f"{chosen}: {_gain(found[chosen])} as fast in {phase} as {smallest} ({_range(found[chosen])}, "
                f"{_rounds(rounds)}), {_gain(phases[other][chosen])} in {other}; {_waste(waste, chosen)}."
            )
            return Recommendation(Verdict.CHANGE, chosen, text)
        if faster and dear is None:
            dear = phase, max(faster, key=lambda size: found[size].median)

    for phase, found in phases.items():
        hidden = [size for size in allowed if _may_be_worth(found[size], _added(waste, size))]
        if hidden:
            widest = max(hidden, key=lambda size: found[size].quartiles[1])
            why = (
                f"the spread is larger than the differences ({widest} in {phase}: {_gain(found[widest])} as fast, "
                f"quartiles {_range(found[widest])}, {_rounds(rounds)})"
            )
            return _unsure(smallest, why, rounds)

    if dear is not None:
        phase, size = dear
        why = (
            f"{size} is {_gain(phases[phase][size])} as fast in {phase} ({_range(phases[phase][size])}, "
            f"{_rounds(rounds)}), but adds {_added(waste, size):.1%} to the memory of the same tokens"
        )
    else:
        size = max(others, key=lambda size: decode[size].median)
        low, high = decode[size].quartiles
        if low > 1:
            limit = f" by {WORTH:.0%} or more"
        elif high < 1:
            limit = ""
        else:
            limit = " by more than the spread"
        why = (
            f"no other size is faster{limit} (best in decode: {size}, {_gain(decode[size])} as fast, quartiles "
            f"{_range(decode[size])}, {_rounds(rounds)})"
        )
    return Recommendation(Verdict.STAY, smallest, f"Stay with {smallest}: {why}; {_waste(waste, size)}.")


def _is_faster(ratio: Ratio) -> bool:
    return ratio.median >= 1 + WORTH and ratio.quartiles[0] > 1


def _is_slower(ratio: Ratio) -> bool:
    return ratio.median <= 1 / (1 + WORTH) and ratio.quartiles[1] < 1


def _may_be_worth(ratio: Ratio, added: float) -> bool:
    low, high = ratio.quartiles
    return low <= 1 and high > 1 + max(WORTH, added)


def _added(waste: Mapping[int, float], size: int) -> float:
    """What a size adds to the memory that the smallest takes for the same tokens, as a share of it."""
    return (1 - waste[min(waste)]) / (1 - waste[size]) - 1


def _unsure(smallest: int, why: str, rounds: int) -> Recommendation:
    more = 15 if rounds < 15 else 2 * rounds + 1
    advice = f"Leave the machine alone and use --rounds {more}; until then stay with {smallest}."
    return Recommendation(Verdict.UNSURE, smallest, f"Not sure: {why}. {advice}")


def _gain(ratio: Ratio) -> str:
    return f"{ratio.median:.2f} times"


def _range(ratio: Ratio) -> str:
    low, high = ratio.quartiles
    return f"{low:.2f} to {high:.2f}"


def _rounds(rounds: int) -> str:
    return f"{rounds} round{'' if rounds == 1 else 's'}"


def _waste(waste: Mapping[int, float], size: int) -> str:
    return f"blocks of {size} waste {waste[size]:.1%} of their slots, those of {min(waste)} {waste[min(waste)]:.1%}"
