"""Recordings: what a pool held at each step, and what became of the requests of a batch.

A recording is told of steps by the pool that they take blocks from, so one that is not running costs a look at an empty
tuple a step. Its memory is bounded: when it is full, every other step is dropped, and from then on every other one is
not kept.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from hf_paged.batching.batcher import ContinuousBatcher
from hf_paged.cache import PagedCache
from hf_paged.pool import BlockPool

if TYPE_CHECKING:
    from hf_paged.allocator import BlockTable
    from hf_paged.batching.requests import FinishReason
    from hf_paged.batching.sequences import Sequence
    from hf_paged.packed import PackedStep
    from hf_paged.plan import StepPlan
    from hf_paged.rows import Rows

logger = logging.getLogger("hf_paged.steps")

RequestState = Literal["waiting", "prompt", "decoding", "preempted"]
BlockTables = dict[str, dict[str, tuple[int, ...]]]
"""By group of layers and by sequence (`row 0`, `request 3`), the physical blocks in order."""
_Tables = list[tuple[str, "list[BlockTable]"]]
"""By sequence, its table in each group of layers."""


@dataclass(slots=True)
class StepRecord:
    """One step, when its blocks had been found and nothing was computed yet. Blocks are summed over the groups of
    layers; most models have one."""

    number: int
    """From 0, in the order of the recording."""
    seconds: float
    """Since the recording began."""
    rows: int
    """Rows of the batch, or sequences that were fed."""
    new_tokens: int
    """That the step stores."""
    tokens: int
    """Stored in all rows of the cache, or all running sequences of the batcher, with those of the step."""
    held_tokens: int
    """That have a slot in a block, over all caches and batchers that the recording has seen, once for each group of
    layers; a token in a shared block counts for each sequence, and one that has left a sliding window does not."""
    used_blocks: int
    """Held by somebody, the kept ones not counted; of the whole pool, as the next four."""
    free_blocks: int
    """Can be taken, the kept ones included."""
    shared_blocks: int
    """Of the used ones, those that several sequences hold."""
    kept_blocks: int
    """Of kept prompts and of rows that have ended, which give way when others need blocks."""
    total_blocks: int
    running: int | None = None
    """Requests, in a batch."""
    waiting: int | None = None
    undone: bool = False
    """The step failed, or was rolled back, and its blocks were given back."""
    block_tables: BlockTables | None = None
    """If they were asked for."""


@dataclass(slots=True)
class Span:
    """A time that a request spent in one state."""

    state: RequestState
    start: float
    """Seconds since the recording began."""
    first_step: int
    end: float | None = None
    """None while it lasts."""
    end_step: int | None = None
    """The first step that is not part of it."""


@dataclass(slots=True)
class RequestRecord:
    """What became of one request, or of one sample of it."""

    index: int
    sample: int
    prompt_tokens: int
    spans: list[Span] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def label(self) -> str:
        """Such as `request 3`, or `request 3.1` for its second sample."""
        return label_of(self.index, self.sample)

    @property
    def end(self) -> float | None:
        """Seconds at which it ended, if it did."""
        return self.spans[-1].end if self.finish_reason is not None and self.spans else None


def label_of(index: int, sample: int) -> str:
    return f"request {index}" + (f".{sample}" if sample else "")


def record(
    target: PagedCache | BlockPool | ContinuousBatcher,
    *,
    tables: bool = False,
    limit: int = 2000,
    on_step: Callable[[StepRecord], object] | None = None,
) -> Recording:
    """Note every step of a cache, of all caches and batchers on a pool, or of a batcher.

    ```python
    with record(cache) as recording:
        model.generate(**inputs, past_key_values=cache)
    draw_occupancy(recording)
    ```

    Steps are logged, too: each at level DEBUG of the logger "hf_paged.steps", and the whole at INFO.

    Args:
        target: what to watch. Blocks are always counted over the whole pool.
        tables: whether to note the block tables at each step.
        limit: steps, and requests, to keep at most. When there are more, every other step is dropped, but never the
            last one nor the one with most blocks; of requests, those that ended first.
        on_step: called with each step, kept or not, once its blocks are found. What it raises fails the step, which is
            then undone.

    Returns:
        A recording that runs within `with`.

    Raises:
        TypeError: something else was passed.
    """
    return Recording(target, tables=tables, limit=limit, on_step=on_step)


class Recording:
    """What `record` notes. It can be read while it runs, too.

    Attributes:
        block_size: tokens per block.
        num_steps: steps so far, the dropped ones included.
        num_undone: how many of them failed or were rolled back.
        num_dropped_requests: requests that were forgotten to stay within the limit.
    """

    def __init__(
        self,
        target: PagedCache | BlockPool | ContinuousBatcher,
        *,
        tables: bool,
        limit: int,
        on_step: Callable[[StepRecord], object] | None,
    ) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 2:
            raise ValueError(f"limit must be an integer of at least 2, not {limit!r}")
        self._pool = pool_of(target)
        self._owner = target._rows if isinstance(target, PagedCache) else target
        self._batchers: list[ContinuousBatcher] = [target] if isinstance(target, ContinuousBatcher) else []
        self._tables, self._limit, self._on_step = tables, limit, on_step
        self.block_size = self._pool.block_size
        self.num_steps = self.num_undone = self.num_dropped_requests = 0
        self._kept: list[StepRecord] = []
        self._stride = 1
        self._last: StepRecord | None = None
        self._peak: StepRecord | None = None
        self._open: weakref.WeakKeyDictionary[Any, tuple[Any, StepRecord]] = weakref.WeakKeyDictionary()
        self._tables_before: weakref.WeakKeyDictionary[Any, dict[Hashable, tuple[int, ...]]] = (
            weakref.WeakKeyDictionary()
        )
        self._requests: dict[int, RequestRecord] = {}  # by the order in which they were seen
        self._followed: dict[Sequence, RequestRecord] = {}  # that have not ended
        self._ran: set[Sequence] = set()  # those of them that ran in the step before
        self._num_seen = 0
        self._began: float | None = None
        self._ended: float | None = None

    def __repr__(self) -> str:
        parts = [f"steps={self.num_steps:,}"]
        if self._requests:
            parts.append(f"requests={self._num_seen:,}")
        if self._peak is not None:
            parts.append(f"peak={self._peak.used_blocks:,} of {self._peak.total_blocks:,} blocks")
        return f"Recording({', '.join(parts)}, {self.seconds:.3g} s{', running' if self.is_running else ''})"

    def _repr_html_(self) -> str:
        from hf_paged.pictures.html import html_of_recording

        return html_of_recording(self)

    # Beginning and end --------------------------------------------------------------------------------------------

    def __enter__(self) -> Recording:
        if self._began is not None:
            raise RuntimeError("this recording has begun already; make a new one with record(...)")
        pool = self._pool
        with pool.lock:
            self._began = time.perf_counter()
            for batcher in self._batchers:
                for sequence in batcher.running:  # what was before is not known
                    self._follow(sequence)
            pool.recordings = (*pool.recordings, self)
        return self

    def __exit__(self, *error: object) -> None:
        pool = self._pool
        if pool is None:  # it has ended
            return
        with pool.lock:
            pool.recordings = tuple(other for other in pool.recordings if other is not self)
            self._see_waiting()
            self._ended = time.perf_counter()
            # Numbers are all that is needed from here on, so nothing is kept alive.
            self._pool = self._owner = self._on_step = None
            self._batchers.clear()
            self._followed.clear()
            self._ran.clear()
            self._open.clear()
            self._tables_before.clear()
        logger.info("%r", self)

    @property
    def is_running(self) -> bool:
        return self._began is not None and self._ended is None

    @property
    def seconds(self) -> float:
        """How long it ran, or has been running."""
        if self._began is None:
            return 0.0
        return (time.perf_counter() if self._ended is None else self._ended) - self._began

    # What it has noted --------------------------------------------------------------------------------------------

    @property
    def steps(self) -> list[StepRecord]:
        """The steps that were kept, the last one, and the one with most blocks, in order."""
        extra = [one for one in (self._peak, self._last) if one is not None]
        return list({one.number: one for one in sorted([*self._kept, *extra], key=lambda one: one.number)}.values())

    @property
    def peak(self) -> StepRecord | None:
        """The step at which most blocks were used, the first of several; undone steps count."""
        return self._peak

    @property
    def requests(self) -> list[RequestRecord]:
        """The requests of the batchers, by index and sample."""
        pool = self._pool  # None once it has ended, which another thread may do meanwhile
        with contextlib.nullcontext() if pool is None else pool.lock:
            if self.is_running:
                self._see_waiting()
            return sorted(self._requests.values(), key=lambda one: (one.index, one.sample))

    def as_dict(self) -> dict[str, Any]:
        """All of it as dicts and lists, for JSON or `pandas.DataFrame(recording.as_dict()["steps"])`."""
        return {
            "block_size": self.block_size,
            "seconds": self.seconds,
            "num_steps": self.num_steps,
            "num_undone": self.num_undone,
            "num_dropped_requests": self.num_dropped_requests,
            "steps": [asdict(one) for one in self.steps],
            "requests": [asdict(one) for one in self.requests],
        }

    # What it is told ----------------------------------------------------------------------------------------------

    def note_step(self, rows: Rows, step: StepPlan) -> None:
        """A step of a cache has found its blocks."""
        with rows.pool.lock:
            if self._owner is not rows and self._owner is not rows.pool:  # or it has ended while others had the lock
                return
            tables = [(f"row {row}", [group[row] for group in rows.tables]) for row in range(rows.num_rows)]
            number = self._note(
                rows,
                step,
                rows=rows.num_rows,
                new_tokens=int((step.positions >= 0).sum()),
                tokens=int(rows.stored_lens.sum()),
                tables=tables,
            )
        self._tell(number)

    def note_batch_step(self, batcher: ContinuousBatcher, step: PackedStep, sequences: list[Sequence]) -> None:
        """A step of a batcher has found its blocks."""
        with batcher.pool.lock:
            if self._owner is not batcher and self._owner is not batcher.pool:
                return
            if batcher not in self._batchers:
                self._batchers.append(batcher)
            running = batcher.running
            self._see_states(step, sequences, running)
            number = self._note(
                batcher,
                step,
                rows=len(sequences),
                new_tokens=step.num_tokens,
                tokens=sum(sequence.num_stored for sequence in running),
                tables=[(label_of(s.handle.index, s.handle.sample), s.tables) for s in running],
                running=len(running),
                waiting=batcher.stats().waiting,
            )
        self._tell(number)

    def note_undone(self, owner: Rows | ContinuousBatcher, step: StepPlan | PackedStep) -> None:
        """A step was taken back."""
        noted, one = self._open.get(owner, (None, None))
        if noted is step and not one.undone:
            one.undone = True
            self.num_undone += 1

    def note_request_end(self, batcher: ContinuousBatcher, sequence: Sequence, reason: FinishReason) -> None:
        """A request of a batcher has ended."""
        with batcher.pool.lock:
            if self._owner is not batcher and self._owner is not batcher.pool:
                return
            one = self._followed.get(sequence) or self._meet(sequence)
            self._switch(one, None)
            one.finish_reason = reason
            self._followed.pop(sequence, None)
            self._ran.discard(sequence)

    # How it notes it ----------------------------------------------------------------------------------------------

    def _note(
        self, owner: Rows | ContinuousBatcher, step: StepPlan | PackedStep, *, tables: _Tables, **facts: Any
    ) -> StepRecord:
        pool = self._pool
        allocators = pool.allocators
        one = StepRecord(
            number=self.num_steps,
            seconds=time.perf_counter() - self._began,
            used_blocks=sum(allocator.num_used for allocator in allocators),
            free_blocks=sum(allocator.num_free for allocator in allocators),
            shared_blocks=sum(allocator.num_shared for allocator in allocators),
            kept_blocks=sum(allocator.num_idle for allocator in allocators),
            total_blocks=sum(allocator.num_blocks for allocator in allocators),
            held_tokens=self._count_held(owner, tables),
            block_tables=self._copy_tables(owner, tables) if self._tables else None,
            **facts,
        )
        self.num_steps += 1
        self._open[owner] = step, one
        self._last = one
        if self._peak is None or one.used_blocks > self._peak.used_blocks:
            self._peak = one
        if one.number % self._stride == 0:
            if len(self._kept) >= self._limit:
                self._stride *= 2
                self._kept = [kept for kept in self._kept if kept.number % self._stride == 0]
            if one.number % self._stride == 0:
                self._kept.append(one)
        return one

    def _count_held(self, owner: Rows | ContinuousBatcher, tables: _Tables) -> int:
        of_groups = [of_sequence for _, of_sequence in tables]
        for other in self._open:
            if other is not owner:
                is_batch = isinstance(other, ContinuousBatcher)
                of_groups += [sequence.tables for sequence in other.running] if is_batch else other.tables
        size = self.block_size
        return sum(max(table.length - table.first * size, 0) for each in of_groups for table in each)

    def _copy_tables(self, owner: Rows | ContinuousBatcher, tables: _Tables) -> BlockTables:
        """A table that is as it was at the step before is the same object."""
        copies: BlockTables = {group.name: {} for group in self._pool.groups}
        before, now_held = self._tables_before.get(owner, {}), {}
        for label, of_groups in tables:
            for group, table in zip(self._pool.groups, of_groups, strict=True):
                key, now = (label, group.name), tuple(table.blocks)
                copies[group.name][label] = now_held[key] = now if now != before.get(key) else before[key]
        self._tables_before[owner] = now_held
        return copies

    def _tell(self, one: StepRecord) -> None:
        """With no lock held, since the callback may wait for other threads."""
        if logger.isEnabledFor(logging.DEBUG):
            batch = "" if one.running is None else f", {one.running} requests running, {one.waiting} waiting"
            logger.debug(
                "step %d: %d rows, %d new tokens, %d stored; of %d blocks %d used (%d shared), %d free (%d kept)%s",
                *(one.number, one.rows, one.new_tokens, one.tokens, one.total_blocks, one.used_blocks),
                *(one.shared_blocks, one.free_blocks, one.kept_blocks, batch),
            )
        if (on_step := self._on_step) is not None:  # it may end in another thread meanwhile
            on_step(one)

    def _see_states(self, step: PackedStep, sequences: list[Sequence], running: list[Sequence]) -> None:
        """Note what the sequences do in this step. Those that wait are looked at when they have waited."""
        fed: dict[Sequence, RequestState] = {}
        for sequence, start, count in zip(sequences, step.starts, step.counts, strict=True):
            fed[sequence] = "decoding" if count == 1 and start >= sequence.num_prompt else "prompt"
        ran, self._ran = self._ran, set(running)
        for sequence in ran - self._ran:
            self._switch(self._followed[sequence], "preempted")
        for sequence in running:
            one = self._followed.get(sequence) or self._meet(sequence)
            if state := fed.get(sequence):
                self._switch(one, state)

    def _see_waiting(self) -> None:
        for batcher in self._batchers:
            for sequence in batcher.waiting:
                if sequence not in self._followed:
                    self._meet(sequence)

    def _meet(self, sequence: Sequence) -> RequestRecord:
        """Follow a request that has waited until now."""
        one = self._follow(sequence)
        start = max(sequence.born - self._began, 0.0)
        first_step = bisect_right([step.seconds for step in self._kept], start)
        first_step = self._kept[first_step].number if first_step < len(self._kept) else self.num_steps
        one.spans.append(Span("waiting", start, first_step))
        return one

    def _follow(self, sequence: Sequence) -> RequestRecord:
        if len(self._requests) >= self._limit:
            gone = next((key for key, one in self._requests.items() if one.finish_reason is not None), None)
            if gone is not None:
                del self._requests[gone]
                self.num_dropped_requests += 1
        one = RequestRecord(sequence.handle.index, sequence.handle.sample, sequence.num_prompt)
        self._requests[self._num_seen] = self._followed[sequence] = one
        self._num_seen += 1
        return one

    def _switch(self, one: RequestRecord, state: RequestState | None) -> None:
        last = one.spans[-1] if one.spans else None
        if last is not None and last.state == state:
            return
        now = time.perf_counter() - self._began
        if last is not None:
            last.end, last.end_step = now, self.num_steps
        if state is not None:
            one.spans.append(Span(state, now, self.num_steps))


def pool_of(target: Any) -> BlockPool:
    """The pool of a cache or batcher, or the pool itself.

    Raises:
        TypeError: something else was passed.
    """
    if isinstance(target, BlockPool):
        return target
    if isinstance(target, PagedCache | ContinuousBatcher):
        return target.pool
    raise TypeError(f"pass a PagedCache, a BlockPool or a ContinuousBatcher, not {type(target).__name__}")
