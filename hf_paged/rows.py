"""The rows of a batch: where each row's tokens stand, in padded order and in its block tables.

transformers counts positions in padded order, where all rows are equally long. Blocks hold only real tokens. This
module keeps both countings in step: it checks each padding mask against what is stored, decides what a step stores,
and finds the blocks for it, for all rows and groups or for none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hf_paged.allocator import BlockTable
from hf_paged.origin import Origin
from hf_paged.plan import StepPlan
from hf_paged.pool import BlockPool
from hf_paged.positions import StoredPositions
from hf_paged.table_arrays import TableArrays

_INTERRUPTED = (
    "the forward pass before this one stopped half-way through the layers. The cache has been put back to the {} "
    "positions that it held before it: run that step again. (Two threads that use one cache at once look like this "
    "too: give each its own, on one BlockPool if they are to share memory)"
)


class Rows:
    """The rows of one cache on a pool. Rows appear with the first step, and go back to the pool with this object.

    Attributes:
        num_rows: the batch, 0 before the first step.
        length: padded length, equal for all rows.
        lengths: padded length that each layer has written, by layer; they differ only within a step.
        stored_lens: `[num_rows]`: real tokens of each row.
        tables: per group of layers, the rows' block tables.
        step: the step that was begun last, until rows are changed in another way.
        has_state: the model has recurrent layers beside those that are paged, whose state no step can be undone in.
        unread: weak reference to a layer whose attention is left to the kernel, until the attention function has got
            what the layer handed out.
        advice: what to say first where a pass seems to have stopped half-way.
        always_dense: the model was seen to change keys or values after an update, so no layer may hand out a
            placeholder.
        state_lost: that state is ahead of the blocks, since a step was undone.
        origin: what is known of where the tokens came from.
    """

    def __init__(self, pool: BlockPool, num_layers: int, has_state: bool = False) -> None:
        self.pool = pool
        self.num_layers = num_layers
        self.has_state = has_state
        self.advice = ""
        self.always_dense = False
        self.tables: list[list[BlockTable]] = []
        self._clear()

    def __del__(self) -> None:
        tables = getattr(self, "tables", [])
        if tables:
            self.pool.give_back(tables)

    def _clear(self) -> None:
        self.num_rows = 0
        self.length = 0
        self.lengths = [0] * self.num_layers
        self.stored_lens = np.zeros(0, np.int32)
        self.tables = []
        self.step: StepPlan | None = None
        self.state_lost = False
        self.unread: Callable[[], Any] | None = None
        self._num_steps = 0  # since the rows were empty
        self._positions = StoredPositions(np.zeros((0, 0), bool))
        self._finishing = np.zeros(0, bool)  # rows that have ended, but whose last token was not fed yet
        self._finished = np.zeros(0, bool)  # rows that store nothing more
        self._any_ended = False
        self.origin = Origin()
        self._parked: set[int] = set()  # finished rows whose blocks others may take
        self._lost: set[int] = set()  # those whose blocks were taken, which the books here do not say yet
        self._arrays = TableArrays()

    # One step ---------------------------------------------------------------------------------------------------

    def begin(
        self, num_rows: int, q_len: int, mask: np.ndarray | None, *, sees_mask: bool, extends: bool = False
    ) -> StepPlan:
        """Plan a forward pass of `q_len` new positions in each of `num_rows` rows. Allocates nothing yet.

        Args:
            mask: `[num_rows, length + q_len]` bool, True for real tokens; None where every position is real.
            sees_mask: whether `mask` says all there is to know. If not, every new position is stored.
            extends: instead of passing `mask`: it is that of the step before, and True for what is new.

        Raises:
            ValueError: other rows than the cache holds, a mask of the wrong size, or one that unmasks a position
                which was never stored.
            RuntimeError: the pass before this one stopped half-way; it has been undone.
        """
        self.settle()
        if self.state_lost:
            raise RuntimeError(
                "a forward pass on this cache failed or was rolled back, and the recurrent state of the model's linear "
                "attention layers cannot be put back to what it was before; use cache.reset() and feed the prompt again"
            )
        if self.num_rows and num_rows != self.num_rows:
            raise ValueError(
                f"this cache holds {self.num_rows} row{'s' if self.num_rows != 1 else ''}, but the batch has "
                f"{num_rows}. Use a new PagedCache, cache.reset(), cache.batch_select_indices() or "
                "cache.batch_repeat_interleave()"
            )
        start, end = self.length, self.length + q_len
        new, must_be_dense = None, False
        if not sees_mask:
            if self.has_holes:
                raise ValueError(
                    "this cache was filled with paged attention enabled, so the padding of its rows is not stored, and "
                    "the padding mask of this forward pass cannot be seen to check it (or rows were released). Keep "
                    "enable_paged_attention(model) on for this cache and pass a 2-D attention_mask, or start from a "
                    "new cache"
                )
        elif extends:
            pass
        elif mask is None:
            if not self._positions.may_all_be_shown(start):
                raise ValueError(
                    "no attention_mask was passed, but rows of this cache have padding, which was never stored, or "
                    f"were released. Pass the mask of all {end} positions"
                )
        else:
            if mask.ndim != 2 or mask.shape[0] != num_rows or mask.shape[1] < end:
                raise ValueError(
                    f"attention_mask has the shape {list(mask.shape)}, but {num_rows} rows hold {start} positions and "
                    f"get {q_len} more: it must be [{num_rows}, {end}]. (A prompt that is wholly in the cache already "
                    "cannot be fed again: crop the cache by at least one token)"
                )
            must_be_dense = bool(start) and self._positions.some_are_hidden_by(mask[:, :start])
            new = mask[:, start:end]
            if new.all():
                new = None
            elif not new[:, -1].all():
                # A row ends in padding, and generate() goes on from that position's output, poor as it is: give the
                # one that the ordinary cache gives. Kernels leave padding out.
                must_be_dense = True
        active = None
        if self._any_ended:
            active = ~self._finished
            if not active.all():
                new = np.broadcast_to(active[:, None], (num_rows, q_len)) & (True if new is None else new)

        stored = self.stored_lens if self.num_rows else np.zeros(num_rows, np.int32)
        if new is None:
            positions = stored[:, None] + np.arange(q_len, dtype=np.int32)
            context_lens = stored + np.int32(q_len)
        else:
            counted = np.cumsum(new, axis=1, dtype=np.int32)
            positions = np.where(new, stored[:, None] + counted - 1, np.int32(-1))
            context_lens = stored + counted[:, -1]
        return StepPlan(
            start=start,
            q_len=q_len,
            sees_mask=sees_mask,
            was_empty=start == 0,
            new_tokens=new,
            positions=np.ascontiguousarray(positions, np.int32),
            context_lens=np.ascontiguousarray(context_lens, np.int32),
            must_be_dense=must_be_dense,
            mask=mask,
        )

    def allocate(self, step: StepPlan) -> None:
        """Find the blocks of a step and make it the current one: for all rows and groups, or for none.

        The caller copies the blocks that `step.growths` names before anything is written.

        Raises:
            OutOfBlocksError: nothing has changed.
        """
        pool, num_rows = self.pool, len(step.context_lens)
        created = not self.num_rows
        with pool.lock:
            tables = [[BlockTable() for _ in range(num_rows)] for _ in pool.groups] if created else self.tables
            self._park_finished()
            before = np.zeros(num_rows, np.int32) if created else self.stored_lens
            counts = (step.context_lens - before).tolist()
            growths = []
            try:
                for group in range(len(pool.allocators)):
                    window = pool.freed_behind(group)
                    # The first new token sees `window` tokens, itself included.
                    start = None if window is None else np.maximum(before - (window - 1), 0).tolist()
                    growths.append(pool.grow(group, tables[group], counts, start))
                if self._lost:
                    step.context_lens[list(self._lost)] = 0
                    self._note_lost()
                step.before = {
                    "created": created,
                    "stored_lens": self.stored_lens,
                    "has_holes": self.has_holes,
                    "finishing": self._finishing,
                    "finished": self._finished,
                }
                step.growths, step.allocated = growths, True
                self._num_steps += 1
                self.step = step  # from here on undo() takes it back
            except BaseException:
                if self.step is step:
                    self.undo()
                else:
                    self._undo_growths(growths)
                raise
        if created:
            self.num_rows, self.tables = num_rows, tables
            self._positions = StoredPositions(np.zeros((num_rows, 0), bool))
            self._finishing = self._finished = np.zeros(num_rows, bool)
            self._arrays = TableArrays(len(tables), num_rows)
        self._record(step)
        self._arrays.sync(self.tables, growths)
        step.block_tables, step.table_stamps = self._arrays.arrays, list(self._arrays.stamps)

    def adopt(self, stored: np.ndarray, blocks: Sequence[Sequence[Sequence[int]]]) -> None:
        """Begin with tokens that are in blocks already.

        Args:
            stored: `[rows, length]` bool: which padded positions they are.
            blocks: by group and row, the blocks that hold a row's tokens, at least as many as are stored.
        """
        pool, (num_rows, length) = self.pool, stored.shape
        counts = stored.sum(axis=1, dtype=np.int32)
        with pool.lock:
            self.tables = [
                [
                    allocator.adopt(row[: -(-int(count) // pool.block_size)], int(count))
                    for row, count in zip(group, counts, strict=True)
                ]
                for allocator, group in zip(pool.allocators, blocks, strict=True)
            ]
        self.num_rows, self.length, self.lengths = num_rows, length, [length] * self.num_layers
        self.stored_lens = counts
        self._positions = StoredPositions(stored.copy())
        self._finishing = self._finished = np.zeros(num_rows, bool)
        self._arrays = TableArrays(len(self.tables), num_rows, are_stale=True)
        self._num_steps = 1

    @property
    def has_holes(self) -> bool:
        """Whether some padded position is not stored."""
        return self._positions.has_holes

    @property
    def stored(self) -> np.ndarray:
        """`[num_rows, length]` bool: which padded positions are stored."""
        return self._positions.up_to(self.length)

    def tokens_of(self, row: int, ids: np.ndarray) -> list[int]:
        """The tokens that a row holds in the first positions, by `ids` `[rows, positions]`."""
        end = min(self.length, ids.shape[1])
        return ids[row, :end][self._positions.up_to(end)[row]].tolist()

    def stores_as(self, mask: np.ndarray) -> bool:
        """Whether `mask` `[num_rows, <= length]` is 1 at the positions that are stored, and 0 at the others."""
        return np.array_equal(mask.astype(bool), self._positions.up_to(mask.shape[1]))

    def stored_positions(self, step: StepPlan) -> np.ndarray | None:
        """`[rows, step.end]` bool: which padded positions have a token in the blocks once `step` is written; None for
        all of them."""
        return self._positions.once_written(step)

    def undo(self) -> None:
        """Take the current step back: blocks, tables and lengths are as before it. Does nothing without one."""
        step, self.step = self.step, None
        self.unread = None
        if step is None or not step.allocated:
            return
        for recording in self.pool.recordings:
            recording.note_undone(self, step)
        self._undo_growths(step.growths)
        self._num_steps -= 1
        self.length = step.start
        self.origin.cut(step.start)
        self.lengths = [min(length, step.start) for length in self.lengths]
        self.stored_lens = step.before["stored_lens"]
        self._positions.has_holes = step.before["has_holes"]
        self._finishing, self._finished = step.before["finishing"], step.before["finished"]
        self._arrays.are_stale = True
        if step.before["created"]:
            self._clear()
        self.state_lost = self.has_state

    def undo_interrupted_first(self, layer: int) -> None:
        """Put the rows back to empty if `layer` missed the very first step, and only that: it was interrupted."""
        if self.lengths[layer] == 0 and self._num_steps == 2:
            self.reset()
            raise RuntimeError(self.advice + _INTERRUPTED.format(0))

    def undo_open(self) -> None:
        """Take the current step back unless its forward pass has ended well."""
        if self.step is not None and not self.step.closed:
            self.undo()

    def check_read(self) -> None:
        """Make sure that the attention function got what the last layer handed out that counts on it."""
        layer = self.unread() if self.unread is not None else None
        self.unread = None
        if layer is not None:
            self.always_dense = True
            layer.hands_over = self.pool.hands_over[layer.index] = False
            self.undo_open()
            raise RuntimeError(
                f"layer {layer.index} did not pass its keys on to the attention function unchanged, which it had done "
                "before. The step was undone; run it again, and every layer is handed dense tensors from now on"
            )

    def settle(self) -> None:
        """Make sure that the step before was written by every layer that takes part, or take it back."""
        self.check_read()
        step = self.step
        if step is None or step.closed:
            return
        if not step.allocated:
            self.step = None
        elif step.end not in self.lengths:
            self.undo()  # it failed before the first layer, and nobody has seen its lengths
        elif step.start and step.start in self.lengths:
            self.undo()
            raise RuntimeError(self.advice + _INTERRUPTED.format(self.length))

    def _record(self, step: StepPlan) -> None:
        self.origin = Origin()
        self._positions.add(step)
        self.length = step.end
        self.stored_lens = step.context_lens
        if self._any_ended:
            self._finished, self._finishing = self._finished | self._finishing, np.zeros_like(self._finishing)

    def _undo_growths(self, growths: Sequence) -> None:
        with self.pool.lock:
            for allocator, growth in zip(self.pool.allocators, growths, strict=False):
                allocator.undo(growth)

    # Rows that end while generate() runs -------------------------------------------------------------------------

    def mark_finished(self, done: np.ndarray) -> None:
        """Note which rows have ended. A row's last token is stored when it is fed; from then on the row stores nothing.

        Args:
            done: `[num_rows]` bool.
        """
        ended = done & ~self._finished
        if not ended.any():
            return
        if not self._any_ended:
            self._any_ended = True
            self._positions.follow_ends()
        self._finishing = self._finishing | ended

    def _park_finished(self) -> None:
        """Let others take the blocks of the rows that have finished. The caller has the pool's lock."""
        if self._any_ended:
            for row in np.flatnonzero(self._finished).tolist():
                if row not in self._parked:
                    self._parked.add(row)
                    for allocator, tables in zip(self.pool.allocators, self.tables, strict=True):
                        allocator.park(tables[row])
                    self.pool.parking.add(self, row)

    def _unpark(self) -> None:
        """Hold the blocks of all rows again, and note which were taken."""
        if self._parked or self._lost:
            with self.pool.lock:
                for row in self._parked:
                    self.pool.parking.remove(self, row)
                    for allocator, tables in zip(self.pool.allocators, self.tables, strict=True):
                        allocator.unpark(tables[row])
                self._parked.clear()
                self._note_lost()

    def lose(self, row: int) -> None:
        """Give the blocks of a parked row to others; any thread may do so that has the pool's lock."""
        for allocator, tables in zip(self.pool.allocators, self.tables, strict=True):
            allocator.release(tables[row])
        self._lost.add(row)

    def _note_lost(self) -> None:
        if self._lost:
            lost = list(self._lost)
            self.stored_lens = self.stored_lens.copy()
            self.stored_lens[lost] = 0
            self._positions.lose(lost, self.length)
            self._arrays.are_stale = True
            self._lost.clear()

    def clear_finished(self) -> None:
        """Let every row store again, as at the end of a generate() call."""
        self._unpark()
        self._finishing = np.zeros(self.num_rows, bool)
        self._finished = np.zeros(self.num_rows, bool)
        self._any_ended = False
        self._positions.forget_ends()
        if self.step is not None and self.step.allocated:
            self.step.before["finishing"] = self.step.before["finished"] = np.zeros(self.num_rows, bool)

    # Whole rows --------------------------------------------------------------------------------------------------

    def select(self, indices: Sequence[int]) -> None:
        """Make row `i` what row `indices[i]` was. Rows named twice share blocks; blocks of rows left out are freed.

        Raises:
            IndexError: an index names no row.
        """
        self._end_step()
        if not self.num_rows:
            return
        if any(not -self.num_rows <= index < self.num_rows for index in indices):
            raise IndexError(f"row indices {list(indices)} for a cache of {self.num_rows} rows")
        old = self.tables
        with self.pool.lock:
            self.tables = [
                [allocator.fork(tables[index]) for index in indices]
                for allocator, tables in zip(self.pool.allocators, old, strict=True)
            ]
            self._release(old)
        index = np.asarray(indices, np.int64)
        self.num_rows = len(index)
        self.origin.take(index)
        self.stored_lens = self.stored_lens[index]
        self._positions.take(index, self.length)
        self._finishing, self._finished = self._finishing[index], self._finished[index]
        self._arrays = self._arrays.for_rows(self.num_rows)
        if not len(index):
            self.reset()

    def crop(self, positions: int) -> None:
        """Remove the last `positions` padded positions of every row.

        Raises:
            ValueError: the rows would need tokens again that have left a sliding window; nothing has changed.
        """
        self._end_step()
        keep = max(self.length - positions, 0)
        gone = self.stored[:, keep:].sum(axis=1, dtype=np.int32)
        self._check_windows(self.stored_lens - gone)
        with self.pool.lock:
            for allocator, tables in zip(self.pool.allocators, self.tables, strict=False):
                for table, count in zip(tables, gone.tolist(), strict=True):
                    allocator.truncate(table, table.length - count)
        self.stored_lens = self.stored_lens - gone
        self.origin.cut(keep)
        self.length = keep
        self.lengths = [min(length, keep) for length in self.lengths]
        self._positions.cut(keep)
        self._arrays.are_stale = True
        if not keep:
            self.reset()

    def _check_windows(self, stored_lens: np.ndarray) -> None:
        size = self.pool.block_size
        for group, tables in enumerate(self.tables):
            window = self.pool.freed_behind(group)
            for row, table in enumerate(tables):
                length = int(stored_lens[row])
                if length and table.first and table.first * size > max(length - window + 1, 0):
                    raise ValueError(
                        f"cannot crop row {row} to {length} tokens: a layer with a window of {window} would need "
                        "tokens that have left it, and whose blocks were freed. Use cache.reset() and feed the prompt "
                        "again"
                    )

    def release(self, rows: Sequence[int]) -> None:
        """Give the blocks of `rows` back. The rows stay in the batch, empty, and store nothing more.

        Raises:
            IndexError: an index names no row.
        """
        self._end_step()
        if any(not -self.num_rows <= row < self.num_rows for row in rows):
            raise IndexError(f"row indices {list(rows)} for a cache of {self.num_rows} rows")
        index = np.asarray(rows, np.int64)
        with self.pool.lock:
            for allocator, tables in zip(self.pool.allocators, self.tables, strict=True):
                for row in rows:
                    allocator.release(tables[row])
        self.stored_lens = self.stored_lens.copy()
        self.stored_lens[index] = 0
        if not self._any_ended:
            self._any_ended = True
            self._positions.follow_ends()
        self._positions.lose(index, self.length)
        self._finished = self._finished.copy()
        self._finished[index] = True
        self._arrays.are_stale = True

    def reset(self) -> None:
        """Give every block back and forget the rows."""
        self._unpark()
        tables = self.tables
        self._clear()
        self._release(tables)

    def fork(self, indices: Sequence[int] | None = None) -> Rows:
        """Rows of their own on the same pool that share every block with these."""
        self._end_step()
        twin = Rows(self.pool, self.num_layers, self.has_state)
        twin.advice = self.advice
        twin.state_lost, twin._num_steps, twin.always_dense = self.state_lost, self._num_steps, self.always_dense
        if self.num_rows:
            twin.num_rows, twin.length, twin.lengths = self.num_rows, self.length, list(self.lengths)
            twin.stored_lens, twin._positions = self.stored_lens, self._positions.copy()
            twin._finishing, twin._finished, twin._any_ended = self._finishing, self._finished, self._any_ended
            twin.origin = copy.copy(self.origin)
            twin._arrays = self._arrays.for_rows(self.num_rows)
            with self.pool.lock:
                twin.tables = [
                    [allocator.fork(table) for table in tables]
                    for allocator, tables in zip(self.pool.allocators, self.tables, strict=True)
                ]
            if indices is not None:
                twin.select(indices)
        return twin

    # Dense layout ------------------------------------------------------------------------------------------------

    def dense_index(self, group: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Where the tokens of a dense view stand in the blocks: made once a step and group.

        Returns:
            Blocks and offsets in them, both `[num_rows, length]` int64 on `device`, and where there are positions that
            are not stored, or have left the window, `[num_rows, length]` bool that is True there.
        """
        known = self.step.dense_index if self.step is not None else {}
        if (group, device) not in known:
            size = self.pool.block_size
            with self.pool.lock:
                self._note_lost()
            slots, stored = np.full((self.num_rows, self.length), -1, np.int64), self.stored
            tables = self.tables[group] if self.tables else ()
            for row, table in enumerate(tables):
                left = table.first * size
                tokens = np.arange(table.length - left)
                slots[row, np.flatnonzero(stored[row])[left:]] = (
                    np.asarray(table.blocks, np.int64)[tokens // size] * size + tokens % size
                )
            has_holes = self.has_holes or any(table.first for table in tables)
            holes = torch.from_numpy(slots < 0).to(device) if has_holes else None
            slots = torch.from_numpy(slots).clamp_(min=0).to(device)
            known[group, device] = slots // size, slots % size, holes
        return known[group, device]

    def has_left_window(self, group: int) -> bool:
        """Whether blocks of these rows have left the group's window and were freed."""
        return any(table.first for table in self.tables[group])

    def _end_step(self) -> None:
        self.settle()
        self._unpark()
        self.step = None

    def _release(self, tables: list[list[BlockTable]]) -> None:
        self.pool.give_back(tables)
