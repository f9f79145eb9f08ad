"""One decode step of a whole model: DynamicCache with sdpa against PagedCache with paged attention."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_paged.bench.harness import Comparison, Order, compare, measure_read_bandwidth, synchronizer
from hf_paged.models import cache_keyword

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

DYNAMIC, PAGED = "dynamic", "paged"
Prefix = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of a row, by layer."""
_WARMUP = 2  # calls of each side that are not timed
_BASE_LENGTH = 16  # short enough that a step's time is all but independent of the cache


class DecodePoint(NamedTuple):
    """A batch of rows that are all `length` tokens long."""

    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.length:,}"


POINTS = tuple(DecodePoint(batch, length) for batch in (1, 8) for length in (128, 1024, 4096))
QUICK_POINTS = (DecodePoint(1, 128), DecodePoint(8, 1024))


class PointResult:
    """What results of one point have in common; their fields are in the dataclasses that derive from it."""

    point: DecodePoint
    logit_difference: float
    """The largest of any side from the first one's logits, relative to the largest logit."""
    tolerance: float
    """What that may be, for the dtype."""

    @property
    def agrees(self) -> bool:
        """Whether all sides computed the same."""
        return self.logit_difference <= self.tolerance

    def figures(self) -> dict[str, Any]:
        """What was measured, for `as_dict`."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        return {
            "batch": self.point.batch,
            "length": self.point.length,
            **self.figures(),
            "logit_difference": self.logit_difference,
            "agrees": self.agrees,
        }


@dataclass(frozen=True)
class DecodeResult(PointResult):
    """What one point gave.

    Attributes:
        comparison: seconds of one decode step, by cache.
        base: the same with a context of a few tokens only: what a step costs before there is a context to read.
        kv_bytes: bytes of keys and values that attention must read in one step.
        added_bytes: of these, what `base` does not read.
        read_bandwidth: bytes per second at which the machine reads as many bytes that lie in one piece.
        logit_difference: largest difference of the two sides' logits after all steps, relative to the largest logit.
        tolerance: what that difference may be, for the dtype.
    """

    point: DecodePoint
    comparison: Comparison
    base: Comparison
    kv_bytes: int
    added_bytes: int
    read_bandwidth: float
    logit_difference: float
    tolerance: float

    def context_seconds(self, name: str) -> float | None:
        """What the context adds to a step of `name`, or None where that drowns in the spread."""
        full, base = self.comparison.timings[name], self.base.timings[name]
        added = full.median - base.median
        return added if added > 2 * (full.iqr + base.iqr) else None

    def context_bandwidth(self, name: str) -> float | None:
        """Bytes of keys and values over the time that the context adds: the rate of attention within the step."""
        seconds = self.context_seconds(name)
        return None if seconds is None else self.added_bytes / seconds

    def figures(self) -> dict[str, Any]:
        return {
            "step": self.comparison.as_dict(),
            "step_without_context": self.base.as_dict(),
            "kv_bytes_per_step": self.kv_bytes,
            "context_bytes_per_s": {name: self.context_bandwidth(name) for name in self.comparison.timings},
            "read_bytes_per_s": self.read_bandwidth,
        }


def measure_decode(
    model: PreTrainedModel,
    points: Sequence[DecodePoint] = POINTS,
    *,
    block_size: int = 16,
    rounds: int = 7,
    steps: int = 4,
    progress: Callable[[str], object] | None = None,
) -> Iterator[DecodeResult]:
    """Time decode steps at each of `points`, one result after the other.

    Both caches hold the same keys and values: those of one row of random tokens, repeated for every row (each row has
    memory of its own). Where layers have windows, states or other layers' keys, the model
    reads the tokens into both. Both run the same steps in alternation and so stay equally long.

    Args:
        rounds: how often each side is timed.
        steps: decode steps in one timing.
    """
    from transformers import DynamicCache

    from hf_paged import PagedCache, enable_paged_attention

    say = progress or (lambda text: None)
    say(f"prefill of {max(point.length for point in points):,} tokens")
    prefix = prefill(model, max(point.length for point in points))
    twin = share_weights(model)
    enable_paged_attention(twin)

    def measure(point: DecodePoint, name: str) -> tuple[Comparison, float, Cache]:
        blocks = point.batch * -(-(point.length + room_of(rounds, steps)) // block_size)
        caches = {
            DYNAMIC: DynamicCache(config=model.config),
            PAGED: PagedCache(model.config, block_size=block_size, num_blocks=blocks),
        }
        found = time_steps(
            {DYNAMIC: model, PAGED: twin},
            caches,
            prefix,
            point,
            rounds=rounds,
            steps=steps,
            progress=lambda text: say(f"decode {name}: {text}"),
        )
        return *found, caches[DYNAMIC]

    bases: dict[int, Comparison] = {}
    for point in points:
        if point.batch not in bases:
            bases[point.batch], *_ = measure(DecodePoint(point.batch, _BASE_LENGTH), f"{point.batch} x {_BASE_LENGTH}")
        comparison, difference, cache = measure(point, str(point))
        kv_bytes = bytes_read(cache, point.length)
        yield DecodeResult(
            point=point,
            comparison=comparison,
            base=bases[point.batch],
            kv_bytes=kv_bytes,
            added_bytes=kv_bytes - bytes_read(cache, min(_BASE_LENGTH, point.length)),
            read_bandwidth=measure_read_bandwidth(kv_bytes, model.device),
            logit_difference=difference,
            tolerance=tolerance_of(model),
        )


def use_sdpa(model: PreTrainedModel) -> None:
    """Have a model attend with sdpa, or as it does where it cannot (as gpt-oss)."""
    with contextlib.suppress(ValueError):
        model.set_attn_implementation("sdpa")


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A second model on the same weights, with a config and hooks of its own."""
    return copy.deepcopy(model, {id(t): t for t in itertools.chain(model.parameters(), model.buffers())})


def room_of(rounds: int, steps: int) -> int:
    """Tokens that each row grows by in `time_steps`."""
    return steps * (rounds + _WARMUP)


def time_steps(
    models: Mapping[str, PreTrainedModel],
    caches: Mapping[str, Cache],
    prefix: Prefix | None,
    point: DecodePoint,
    *,
    rounds: int,
    steps: int,
    order: Order | None = None,
    progress: Callable[[str], object],
) -> tuple[Comparison, float]:
    """Fill the caches, and time decode steps of each side in turn; the first side is the baseline.

    Returns:
        Seconds per decode step of each side, and the largest difference of any side's last logits from the baseline's,
        relative to the largest logit.
    """
    fill_all(models, caches, prefix, point)
    baseline = next(iter(caches))
    ids = random_ids(models[baseline], (point.batch, room_of(rounds, steps)))
    decoders = {name: _Decoder(models[name], caches[name], point.length, ids) for name in caches}
    comparison = compare(
        {name: lambda decoder=decoder: decoder.run(steps) for name, decoder in decoders.items()},
        repeats=rounds,
        warmup=_WARMUP,
        units=steps,
        order=order,
        sync=synchronizer(models[baseline].device),
        progress=progress,
    )
    want = decoders[baseline].logits
    return comparison, max(relative_difference(decoder.logits, want) for decoder in decoders.values())


def relative_difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    got, want = got.float(), want.float()
    return ((got - want).abs().max() / want.abs().max()).item()


def tolerance_of(model: PreTrainedModel) -> float:
    """What the relative difference of logits may be, for the model's dtype."""
    return 16 * torch.finfo(model.dtype).eps if model.dtype != torch.float32 else 1e-3


class _Decoder:
    """Runs decode steps as generate() does: one token a row, an attention mask that grows, explicit positions."""

    def __init__(self, model: PreTrainedModel, cache: Cache, length: int, ids: torch.Tensor) -> None:
        self.model, self.length, self.ids = model, length, ids
        self.cache = {cache_keyword(model): cache}
        self.done = 0
        rows, room = ids.shape
        self.mask = torch.ones(rows, length + room, dtype=torch.long, device=ids.device)
        self.logits = torch.empty(0)  # [rows, 1, vocabulary] after the first step

    @torch.no_grad()
    def run(self, steps: int) -> None:
        for _ in range(steps):
            position = self.length + self.done
            self.logits = self.model(
                input_ids=self.ids[:, self.done : self.done + 1],
                attention_mask=self.mask[:, : position + 1],
                position_ids=torch.tensor([[position]], device=self.ids.device),
                use_cache=True,
                logits_to_keep=1,
                **self.cache,
            ).logits
            self.done += 1


@torch.no_grad()
def prefill(model: PreTrainedModel, length: int) -> Prefix | None:
    """Keys and values of one row of random tokens, by layer: two tensors `[1, kv_heads, length, head_dim]` each.

    None where a layer keeps anything else: the tokens of a window, a state, or nothing.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    read(model, cache, DecodePoint(1, length))
    pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    has_states = any(hasattr(layer, "recurrent_states") for layer in cache.layers)
    is_whole = all(key is not None and key.shape[2] == length for key, _ in pairs)
    return pairs if is_whole and not has_states else None


@torch.no_grad()
def read(model: PreTrainedModel, cache: Cache, point: DecodePoint, chunk: int = 512) -> None:
    """Have the model read the same random tokens in every row."""
    for ids in random_ids(model, (1, point.length)).expand(point.batch, -1).split(chunk, dim=1):
        model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_keyword(model): cache})


def fill_all(
    models: Mapping[str, PreTrainedModel], caches: Mapping[str, Cache], prefix: Prefix | None, point: DecodePoint
) -> None:
    """Store `point.length` tokens in every row of each cache: those of `prefix`, or else read by the cache's model."""
    for name, cache in caches.items():
        if prefix is None:
            read(models[name], cache, point)
        else:
            fill(cache, prefix, point)


def bytes_read(cache: Cache, length: int) -> int:
    """Bytes of keys and values that a DynamicCache keeps of rows of `length` tokens, which may have grown since."""
    tensors = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(t[:, :, :1].nbytes * min(t.shape[2], length) for t in tensors if t is not None)


@torch.no_grad()
def fill(cache: Cache, prefix: Prefix, point: DecodePoint) -> None:
    """Store the first `point.length` tokens of `prefix` in every row."""
    for index, pair in enumerate(prefix):
        key, value = (t[:, :, : point.length].repeat(point.batch, 1, 1, 1) for t in pair)
        cache.update(key, value, index)


def random_ids(model: PreTrainedModel, shape: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(vocabulary, shape, generator=generator).to(model.device)
