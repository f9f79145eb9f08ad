"""How many requests a budget holds: with a length reserved for each, and in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hf_paged.allocator import check_block_size
from hf_paged.capacity.footprint import LARGEST_POOL, Footprint
from hf_paged.sizes import format_size

BLOCK_SIZES = (16, 32, 64, 128, 256)
QUANTILES = (50, 90, 99)


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes for keys and values, and what they are the rest of; the others are None where they were given as such."""

    kv_bytes: int
    total_bytes: int | None = None
    weight_bytes: int | None = None
    overhead_bytes: int | None = None

    @classmethod
    def of_gpu(cls, total_bytes: int, weight_bytes: int, overhead_bytes: int) -> MemoryBudget:
        """What weights and overhead (activations, the CUDA context) leave.

        Raises:
            ValueError: they leave nothing.
        """
        rest = total_bytes - weight_bytes - overhead_bytes
        if rest <= 0:
            raise ValueError(
                f"weights of {format_size(weight_bytes)} and {format_size(overhead_bytes)} for activations leave "
                f"nothing of {format_size(total_bytes)} for keys and values"
            )
        return cls(rest, total_bytes, weight_bytes, overhead_bytes)


@dataclass(frozen=True)
class Fit:
    """One way of keeping requests in memory.

    Attributes:
        bytes_per_request: that are reserved for it.
        token_bytes: of these, what its tokens and state take.
        kv_bytes: the budget, or None.
    """

    bytes_per_request: int
    token_bytes: int
    kv_bytes: int | None

    @property
    def requests(self) -> int | None:
        """Whole requests that fit; None without a budget."""
        return None if self.kv_bytes is None else self.kv_bytes // self.bytes_per_request

    @property
    def ratio(self) -> float | None:
        """The same before it is rounded down."""
        return None if self.kv_bytes is None else self.kv_bytes / self.bytes_per_request

    @property
    def waste_bytes(self) -> int:
        """Reserved bytes of a request that hold nothing."""
        return self.bytes_per_request - self.token_bytes

    @property
    def waste(self) -> float:
        """The same as a share of what is reserved, 0.0 to 1.0."""
        return self.waste_bytes / self.bytes_per_request

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {name: getattr(self, name) for name in ("requests", "ratio", "waste_bytes", "waste")}


@dataclass(frozen=True)
class BlockFit(Fit):
    """Requests in blocks, as a `BlockPool` keeps them.

    Attributes:
        block_size: tokens a block.
        blocks: that a request takes in the group of layers that holds most.
        idle_window_bytes: of a request: windowed layers have as many blocks as the others, and need fewer. On a CPU the
            system never commits them; on a GPU they are reserved all the same.
    """

    block_size: int
    blocks: int
    idle_window_bytes: int

    @property
    def tail_bytes(self) -> int:
        """Waste that is no idle window: unfilled ends of blocks, and tokens that have left a window within one."""
        return self.waste_bytes - self.idle_window_bytes

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | {"tail_bytes": self.tail_bytes}


@dataclass(frozen=True)
class BlockSizeFit(Fit):
    """Requests in blocks of another size, on average over many lengths, since a single one may fill its blocks by
    chance.

    Attributes:
        block_size: tokens a block.
    """

    block_size: int


@dataclass(frozen=True)
class Spread:
    """Figures of many requests, in tokens."""

    mean: float
    quantiles: dict[int, float]
    """By percent."""
    max: int

    @classmethod
    def of(cls, values: np.ndarray) -> Spread:
        found = np.percentile(values, QUANTILES, method="inverted_cdf")
        return cls(
            float(values.mean()), {q: float(v) for q, v in zip(QUANTILES, found, strict=True)}, int(values.max())
        )


@dataclass(frozen=True)
class LengthsPlan:
    """What real lengths make of a plan. Every request is taken to gain a token a step.

    Attributes:
        count: requests.
        prompt: lengths of the prompts.
        output: lengths of the answers.
        total: both together.
        too_long: requests of more tokens than `max_length`, which a reservation cannot serve.
        running_bytes: that a request holds in the pool on average while its answer grows, longer answers counting for
            the longer time that they take.
        ended_bytes: the same when all have their last token.
        longest_bytes: of the longest.
        running: requests that fit at a time, if those in memory are like the average while they run; None without a
            budget.
        ended: the same if all are at their end.
        worst: the same if all are as long as the longest.
    """

    count: int
    prompt: Spread
    output: Spread
    total: Spread
    too_long: int
    running_bytes: float
    ended_bytes: float
    longest_bytes: int
    running: int | None
    ended: int | None
    worst: int | None


@dataclass(frozen=True)
class CapacityPlan:
    """How many requests fit. All sizes are bytes, all lengths tokens.

    Attributes:
        length: of a request, prompt and answer.
        max_length: that is reserved for each in the contiguous way.
        contiguous: a `StaticCache` of `max_length` for each request.
        blocks: a `PagedCache`.
        own_windows: the blocks that are in use at a request's peak, which is all that a pool would need whose windowed
            layers had a size of their own; None without such layers.
        num_blocks: of a pool that takes the whole budget, states left out; None without a budget.
        max_memory_bytes: what a pool would reserve that was told the same as `max_memory`; it takes all layers to be
            as large as the first.
        block_sizes: the effect of the block size, over the real lengths if there are any, else over 256 lengths around
            `length`.
        requests: as asked for, with the bytes that they take; None unless asked.
        notes: what to know of these figures.
    """

    footprint: Footprint
    budget: MemoryBudget | None
    length: int
    max_length: int
    contiguous: Fit
    blocks: BlockFit
    own_windows: Fit | None
    num_blocks: int | None
    max_memory_bytes: int | None
    block_sizes: tuple[BlockSizeFit, ...]
    requests: int | None
    lengths: LengthsPlan | None
    notes: tuple[str, ...]

    @property
    def requests_bytes(self) -> tuple[int, int, int] | None:
        """What `requests` requests take: their tokens, their blocks, and `max_length` reserved for each."""
        if self.requests is None:
            return None
        each = (self.blocks.token_bytes, self.blocks.bytes_per_request, self.contiguous.bytes_per_request)
        tokens, blocks, contiguous = (self.requests * nbytes for nbytes in each)
        return tokens, blocks, contiguous

    def as_dict(self) -> dict[str, Any]:
        """The same as dicts and lists, for JSON."""
        names = ("length", "max_length", "num_blocks", "max_memory_bytes", "requests", "notes")
        sizes = self.requests_bytes
        return {
            "model": asdict(self.footprint) | {"bytes_per_token": self.footprint.bytes_per_token},
            "budget": self.budget and asdict(self.budget),
            **{name: getattr(self, name) for name in names},
            "requests_bytes": sizes and dict(zip(("tokens", "blocks", "contiguous"), sizes, strict=True)),
            "contiguous": self.contiguous.as_dict(),
            "blocks": self.blocks.as_dict(),
            "own_windows": self.own_windows and self.own_windows.as_dict(),
            "block_sizes": [fit.as_dict() for fit in self.block_sizes],
            "lengths": self.lengths and asdict(self.lengths),
        }


def plan_capacity(
    footprint: Footprint,
    budget: MemoryBudget | int | None = None,
    *,
    length: int = 500,
    max_length: int = 8192,
    block_size: int = 16,
    requests: int | None = None,
    lengths: tuple[Sequence[int], Sequence[int]] | None = None,
) -> CapacityPlan:
    """Divide a budget among requests.

    Args:
        footprint: of the model; `footprint_of(config)`, or `Footprint.per_token(bytes)`.
        budget: bytes for keys, values and states, or None: then only what a request takes is worked out.
        length: tokens of a request, prompt and answer.
        max_length: tokens that are reserved for each in the contiguous way.
        block_size: tokens a block, a power of two from 1 to 256.
        requests: also work out what so many take.
        lengths: tokens of real prompts and of their answers, as `read_lengths` gives them.

    Raises:
        ValueError: a size out of range, or a request that is longer than `max_length`.
    """
    check_block_size(block_size)
    for name, value in (("length", length), ("max_length", max_length), ("requests", requests)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be positive, not {value}")
    for name, value in (("length", length), ("max_length", max_length)):
        if value > LARGEST_POOL:
            raise ValueError(f"{name} must be at most {LARGEST_POOL:,}, the tokens of the largest pool, not {value:,}")
    if length > max_length:
        raise ValueError(f"a request of {length:,} tokens does not fit into the {max_length:,} of max_length")
    budget = MemoryBudget(budget) if isinstance(budget, int) else budget
    kv_bytes = None if budget is None else budget.kv_bytes
    blocks = block_fit(footprint, kv_bytes, length, block_size)
    held = footprint.held_bytes(length, block_size)
    has_windows = any(group.frees_blocks for group in footprint.groups)
    num_blocks, max_memory_bytes = _pool_of(footprint, kv_bytes, blocks)
    real = None if lengths is None else _checked(*lengths)
    largest = max(BLOCK_SIZES)  # over a whole block of each size
    around = np.maximum(np.arange(largest) + length - largest // 2, 1) if real is None else real[0] + real[1]
    return CapacityPlan(
        footprint=footprint,
        budget=budget,
        length=length,
        max_length=max_length,
        contiguous=Fit(footprint.contiguous_bytes(max_length), footprint.token_bytes(length), kv_bytes),
        blocks=blocks,
        own_windows=Fit(held, footprint.token_bytes(length), kv_bytes) if has_windows else None,
        num_blocks=num_blocks,
        max_memory_bytes=max_memory_bytes,
        block_sizes=tuple(
            _block_size_fit(footprint, kv_bytes, around, size) for size in sorted({*BLOCK_SIZES, block_size})
        ),
        requests=requests,
        lengths=None if real is None else _plan_lengths(footprint, kv_bytes, max_length, block_size, *real),
        notes=tuple(_notes(footprint, budget, kv_bytes, length, blocks, max_memory_bytes)),
    )


def block_fit(footprint: Footprint, kv_bytes: int | None, length: int, block_size: int) -> BlockFit:
    """Requests of `length` tokens in blocks of `block_size`."""
    blocks = footprint.pool_blocks(length, block_size)
    reserved = footprint.state_bytes + int(footprint.pool_bytes(blocks, block_size))
    idle = reserved - footprint.held_bytes(length, block_size)
    return BlockFit(reserved, footprint.token_bytes(length), kv_bytes, block_size, blocks, idle)


def _block_size_fit(footprint: Footprint, kv_bytes: int | None, lengths: np.ndarray, block_size: int) -> BlockSizeFit:
    blocks = float(footprint.pool_blocks(lengths, block_size).mean())
    reserved = footprint.state_bytes + footprint.pool_bytes(blocks, block_size)
    return BlockSizeFit(round(reserved), round(float(footprint.token_bytes(lengths).mean())), kv_bytes, block_size)


def _checked(prompts: Sequence[int], outputs: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    if (most := max(max(prompts, default=0), max(outputs, default=0))) > LARGEST_POOL:
        raise ValueError(f"one of the lengths is {most:,}, and the largest pool has {LARGEST_POOL:,} tokens")
    prompt, output = np.asarray(prompts, dtype=np.int64), np.asarray(outputs, dtype=np.int64)
    if prompt.shape != output.shape or prompt.ndim != 1 or not len(prompt):
        raise ValueError(f"{len(prompt):,} prompts and {len(output):,} answers: as many of both are needed, and some")
    if min(prompt.min(), output.min()) < 0 or (prompt + output).min() < 1:
        raise ValueError("lengths must not be negative, and every request needs a token")
    return prompt, output


def _pool_of(footprint: Footprint, kv_bytes: int | None, blocks: BlockFit) -> tuple[int | None, int | None]:
    """Blocks of a pool that takes what the states of its requests leave, and what one told `max_memory` reserves."""
    if kv_bytes is None:
        return None, None
    size = blocks.block_size
    rest = kv_bytes - (blocks.requests or 0) * footprint.state_bytes
    num_blocks = min(rest // (size * footprint.bytes_per_token), LARGEST_POOL // size)
    if footprint.first_layer_bytes is None:
        return num_blocks, None
    as_first = min(rest // (size * footprint.first_layer_bytes * footprint.num_layers), LARGEST_POOL // size)
    return num_blocks, int(footprint.pool_bytes(as_first, size))


def _plan_lengths(
    footprint: Footprint,
    kv_bytes: int | None,
    max_length: int,
    block_size: int,
    prompt: np.ndarray,
    output: np.ndarray,
) -> LengthsPlan:
    total = prompt + output
    longest = int(total.max())
    blocks = footprint.pool_blocks(total, block_size)
    steps = np.maximum(output, 1)
    while_growing = footprint.summed_blocks(total, block_size) - footprint.summed_blocks(prompt, block_size)
    held = np.where(output > 0, while_growing, blocks)

    def bytes_of(blocks: float) -> float:
        return footprint.pool_bytes(blocks, block_size) + footprint.state_bytes

    def fitting(nbytes: float) -> int | None:
        return None if kv_bytes is None else int(kv_bytes // nbytes)

    running = bytes_of(float(held.sum() / steps.sum()))
    ended, worst = bytes_of(float(blocks.mean())), int(bytes_of(footprint.pool_blocks(longest, block_size)))
    return LengthsPlan(
        count=len(total),
        prompt=Spread.of(prompt),
        output=Spread.of(output),
        total=Spread.of(total),
        too_long=int((total > max_length).sum()),
        running_bytes=running,
        ended_bytes=ended,
        longest_bytes=worst,
        running=fitting(running),
        ended=fitting(ended),
        worst=fitting(worst),
    )


def _notes(
    footprint: Footprint,
    budget: MemoryBudget | None,
    kv_bytes: int | None,
    length: int,
    blocks: BlockFit,
    max_memory_bytes: int | None,
) -> list[str]:
    notes = []
    if footprint.max_positions and length > footprint.max_positions:
        notes.append(f"The config gives {footprint.max_positions:,} tokens as the longest sequence of this model.")
    windowed = [group for group in footprint.groups if group.frees_blocks]
    if windowed and len(windowed) < len(footprint.groups):
        notes.append(
            "Windowed layers free the blocks that have left the window, but a pool gives them as many blocks as the "
            "other layers. A CPU commits only what is written; a GPU reserves all."
        )
    elif windowed:
        notes.append(
            "Every layer has a window. While a prompt is read all its blocks are held, so a batch of prompts longer "
            "than the window needs more for that moment."
        )
    if footprint.state_bytes:
        notes.append(
            "The states of recurrent layers are transformers' own tensors beside the pool: they are counted for each "
            "request here, and num_blocks leaves room for them."
        )
    if footprint.is_quantized and budget is not None and budget.weight_bytes == footprint.weight_bytes:
        notes.append(
            "The config names a quantization, but the weights are counted unquantized: give their size with --weights."
        )
    if max_memory_bytes is not None and kv_bytes is not None and footprint.first_layer_bytes is not None:
        even = footprint.first_layer_bytes * footprint.num_layers
        if even != footprint.bytes_per_token:
            more = "more" if even < footprint.bytes_per_token else "less"
            notes.append(
                f"Layers differ in size, and max_memory= takes all to be as large as the first: it would reserve "
                f"{abs(footprint.bytes_per_token / even - 1):.0%} {more} than it is told. Give the pool num_blocks=."
            )
    if blocks.requests == 0:
        notes.append("Not even one such request fits.")
    return notes
