"""Blocks, and the tables that map a sequence's tokens to them. Plain Python: no tensors, no models, no devices.

Token `i` of a sequence lives in slot `i % block_size` of block `table.blocks[i // block_size]`. Blocks are counted
references, so that sequences may share them; a sequence that writes into a block which others hold as well gets a
copy of its own first (copy-on-write). The scheme is PagedAttention's (Kwon et al., 2023, arXiv 2309.06180).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hf_paged.errors import OutOfBlocksError

MAX_BLOCK_SIZE = 256


class BlockTable:
    """The blocks of one sequence, in order, and the number of tokens in them.

    Attributes:
        blocks: physical block ids; entry `j` holds tokens `(first + j) * block_size` and up.
        first: blocks at the beginning that have left a sliding window and were returned.
        length: tokens in the sequence, those that left included. Only the last block may be partly filled.
        is_parked: nobody is using the sequence now, so its blocks may be taken when others need them.
    """

    __slots__ = ("blocks", "first", "is_parked", "length")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.first = 0
        self.length = 0
        self.is_parked = False

    def __repr__(self) -> str:
        left = f", first={self.first}" if self.first else ""
        return f"BlockTable(length={self.length}{left}, blocks={self.blocks})"


@dataclass(slots=True)
class Growth:
    """What one call of `BlockAllocator.grow` did; `BlockAllocator.undo` takes it back.

    Attributes:
        copies: `(source, destination)` blocks whose contents must be copied before anything is written.
        changed: `(index, entry)`: table `index` has new blocks from `entry` on.
    """

    copies: list[tuple[int, int]] = field(default_factory=list)
    changed: list[tuple[int, int]] = field(default_factory=list)
    stamp: int = 0
    """The allocator's count of changes after this one."""
    before: list[tuple[BlockTable, int, int, int | None]] = field(default_factory=list)
    """Per grown table: the table, its length and number of blocks before, and its last block if others shared it."""


class _Left(NamedTuple):
    """A table before blocks left it at its beginning."""

    table: BlockTable
    first: int
    held: list[int]
    blocks: list[int]
    """Those that left."""
    references: list[int]
    """Of these."""
    idle: int


@dataclass(slots=True)
class _GrowthPlan:
    """What `grow` will do."""

    growth: Growth = field(default_factory=Growth)
    needed: int = 0
    writers: dict[int, int] = field(default_factory=dict)
    """Shared tail block -> tables that write into it."""
    tables: list[tuple[int, BlockTable, int, bool]] = field(default_factory=list)
    """Index, table, whole new blocks, whether its tail is shared."""


class BlockAllocator:
    """Hands out the blocks of a pool and counts who holds them.

    Taking and returning blocks costs time in proportion to the blocks touched, whatever the size of the pool: ids that
    were never used are only a watermark, and returned ones a stack, last returned first taken, so that memory which
    is already committed (and likely in a CPU's cache) is used again before new memory is touched. A table is returned
    in an order that makes the next taker's ids ascend, because ascending blocks are read faster.

    A sequence that nobody uses for now can be parked: it keeps its blocks, but those that only parked sequences hold
    are counted as free, and when they are needed `reclaim` is asked to release parked sequences.

    Args:
        num_blocks: blocks in the pool, at least 1.
        block_size: tokens per block, a power of two from 1 to 256.

    Raises:
        ValueError: a size out of range.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        check_block_size(block_size)
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 1:
            raise ValueError(f"num_blocks must be an integer of at least 1, not {num_blocks!r}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.peak_used = 0
        """The most blocks that were in use at once when a sequence grew: so many the pool had to have."""
        self._free: list[int] = []
        self._fresh = 0  # ids from here up were never used
        self._references: list[int] = []  # of ids below _fresh
        self._parked: dict[int, int] = {}  # block -> references from parked tables
        self._idle = 0  # blocks that parked tables alone hold
        self._stamp = 0  # counts changes
        self.reclaim: Callable[[BlockAllocator], bool] | None = None
        """Releases one parked table of this allocator, or says that there is none."""

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, those included that parked tables alone hold."""
        return self._num_unheld + self._idle

    @property
    def num_used(self) -> int:
        """Blocks that at least one table holds which is not parked."""
        return self._fresh - len(self._free) - self._idle

    @property
    def num_idle(self) -> int:
        """Blocks that parked tables alone hold."""
        return self._idle

    @property
    def _num_unheld(self) -> int:
        return len(self._free) + self.num_blocks - self._fresh

    @property
    def high_water(self) -> int:
        """No block from this id up was ever used."""
        return self._fresh

    @property
    def num_shared(self) -> int:
        """Blocks that several tables hold which are not parked. Costs time in proportion to the blocks ever used."""
        references = self._references
        shared = len(references) - references.count(0) - references.count(1)
        return shared - sum(references[block] > 1 >= references[block] - n for block, n in self._parked.items())

    def references(self, block: int) -> int:
        """How many tables hold `block`."""
        return self._references[block] if block < self._fresh else 0

    def is_shared(self, block: int) -> bool:
        """Whether several tables hold `block` which are not parked."""
        return self.references(block) - self._parked.get(block, 0) > 1

    def all_references(self) -> tuple[list[int], dict[int, int]]:
        """How many tables hold each block below `high_water`, and how many of the tables that hold a block are parked,
        for blocks that have such; copies, made at once."""
        return list(self._references), dict(self._parked)

    def grow(
        self, tables: Sequence[BlockTable], counts: Sequence[int], needed_from: Sequence[int] | None = None
    ) -> Growth:
        """Make room for `counts[i]` more tokens in each `tables[i]`: for all of them, or for none.

        A table takes a block only when its last one is full. A partly filled last block that others hold too is
        replaced by a copy of its own; where every holder of such a block writes in this call, the last one keeps it.

        Args:
            tables: the tables to grow, each at most once.
            counts: tokens to add to each, 0 or more.
            needed_from: the first token of each that is still needed, where a sliding window has left others behind.
                Blocks of tokens before it are returned, at once usable for this growth, and `undo` does not bring them
                back. A table that does not grow keeps all.

        Returns:
            The blocks to copy, the tables that changed, and what `undo` needs.

        Raises:
            OutOfBlocksError: not enough free blocks; nothing has changed.
        """
        if needed_from is None:
            return self._grow(tables, counts)
        left: list[_Left] = []
        try:
            for table, count, start in zip(tables, counts, needed_from, strict=True):
                if count and start // self.block_size > table.first:
                    self._leave(table, start, left)
            return self._grow(tables, counts)
        except BaseException:
            self._come_back(left)
            raise

    def _leave(self, table: BlockTable, needed_from: int, left: list[_Left]) -> None:
        """Return the blocks of tokens before `needed_from`. What was is noted in `left` before it is changed."""
        count = min(needed_from // self.block_size - table.first, len(table.blocks))
        blocks = table.blocks[:count]
        references = [self._references[block] for block in blocks]
        left.append(_Left(table, table.first, list(table.blocks), blocks, references, self._idle))
        del table.blocks[:count]
        table.first += count
        self._stamp += 1
        self._drop(blocks)

    def _come_back(self, left: list[_Left]) -> None:
        """Undo what `_leave` has done, if nothing was taken since."""
        for note in reversed(left):
            for block, count in zip(note.blocks, note.references, strict=True):
                if self._references[block] == 0:
                    with contextlib.suppress(ValueError):  # an interrupt came before it was put there
                        self._free.remove(block)
                self._references[block] = count
            note.table.blocks[:] = note.held
            note.table.first = note.first
            self._idle = note.idle

    def _grow(self, tables: Sequence[BlockTable], counts: Sequence[int]) -> Growth:
        plan = self._plan_growth(tables, counts)
        if plan.needed > self.num_free:
            raise OutOfBlocksError(plan.needed, self.num_free, self.num_blocks, self.block_size)
        while plan.needed > self._num_unheld:
            if self.reclaim is None or not self.reclaim(self):
                raise RuntimeError(f"{self._idle} blocks are held by parked tables alone, but none can be released")
            plan = self._plan_growth(tables, counts)  # a block may have lost its other holder
        growth, references, needed, writers, plans = (
            plan.growth,
            self._references,
            plan.needed,
            plan.writers,
            plan.tables,
        )

        # From here on nothing can fail but an interrupt, which is undone by putting the old values back.
        free, num_free, fresh, peak, idle = self._free, len(self._free), self._fresh, self.peak_used, self._idle
        reused = min(needed, num_free)
        taken = free[num_free - reused :][::-1] + list(range(fresh, fresh + needed - reused))
        counts_before = {tail: references[tail] for tail in writers}
        try:
            del free[num_free - reused :]
            references.extend([0] * (needed - reused))
            self._fresh = fresh + needed - reused
            for block in taken:
                references[block] = 1
            supply = iter(taken)
            for index, table, new, tail_shared in plans:
                entry = len(table.blocks)
                if tail_shared and references[table.blocks[-1]] > 1:
                    entry -= 1
                    tail, copy = table.blocks[-1], next(supply)
                    references[tail] -= 1
                    if references[tail] == self._parked.get(tail):
                        self._idle += 1
                    table.blocks[-1] = copy
                    growth.copies.append((tail, copy))
                for _ in range(new):
                    table.blocks.append(next(supply))
                if entry < len(table.blocks):
                    growth.changed.append((index, entry))
            for table, count in zip(tables, counts, strict=True):
                table.length += count
            self.peak_used = max(peak, self.num_used)
            self._stamp += 1
            growth.stamp = self._stamp
        except BaseException:
            for table, length, held, tail in growth.before:
                table.length = length
                del table.blocks[held:]
                if tail is not None:
                    table.blocks[-1] = tail
            for tail, count in counts_before.items():
                references[tail] = count
            for block in taken[:reused]:
                references[block] = 0
            if len(free) != num_free:
                free.extend(reversed(taken[:reused]))
            del references[fresh:]
            self._fresh, self.peak_used, self._idle = fresh, peak, idle
            raise
        return growth

    def _plan_growth(self, tables: Sequence[BlockTable], counts: Sequence[int]) -> _GrowthPlan:
        size, references = self.block_size, self._references
        plan = _GrowthPlan()
        # Decode comes here once a step with every row, so this loop is written to be fast.
        note, needed, writers = plan.growth.before.append, 0, plan.writers
        for index, (table, count) in enumerate(zip(tables, counts, strict=True)):
            if count <= 0:
                if count:
                    raise ValueError(f"cannot grow a table by {count} tokens; use truncate")
                continue
            if table.is_parked:
                raise ValueError("a parked table cannot grow; unpark it first")
            blocks, length = table.blocks, table.length
            held = len(blocks)
            room = (table.first + held) * size - length
            tail = None
            if room and references[blocks[-1]] > 1:
                tail = blocks[-1]
                writers[tail] = writers.get(tail, 0) + 1
            note((table, length, held, tail))
            if count > room:
                new = -(-(count - room) // size)
                needed += new
                plan.tables.append((index, table, new, tail is not None))
            elif tail is not None:
                plan.tables.append((index, table, 0, True))
        plan.needed = needed
        for tail, count in plan.writers.items():
            plan.needed += min(count, references[tail] - 1)
        return plan

    def undo(self, growth: Growth) -> None:
        """Take back a `grow` whose tables were not touched since.

        A shared block that was replaced by a copy comes back, unless anything happened in between: then its other
        holders may have let it go, or have written to it, and the table keeps the copy.
        """
        untouched = growth.stamp == self._stamp
        self._stamp += 1
        for table, length, held, tail in reversed(growth.before):
            self.unpark(table)
            dropped = table.blocks[held:]
            del table.blocks[held:]
            if tail is not None and table.blocks[-1] != tail and untouched:
                dropped.insert(0, table.blocks[-1])
                table.blocks[-1] = tail
                self._hold((tail,))
            table.length = length
            self._drop(dropped)

    def fork(self, table: BlockTable) -> BlockTable:
        """A second sequence with the same tokens. It shares every block; nothing is copied until one of them writes."""
        return self.adopt(table.blocks, table.length, table.first)

    def adopt(self, blocks: Sequence[int], length: int, first: int = 0) -> BlockTable:
        """A new sequence of `length` tokens in blocks that others hold, of which `first` more have left a window."""
        twin = BlockTable()
        twin.blocks = list(blocks)
        twin.first = first
        twin.length = length
        self._stamp += 1
        self._hold(twin.blocks)
        self.peak_used = max(self.peak_used, self.num_used)
        return twin

    def park(self, table: BlockTable) -> None:
        """Let others take the table's blocks when they need them. Parking twice is harmless."""
        if table.is_parked:
            return
        table.is_parked = True
        for block in table.blocks:
            count = self._parked[block] = self._parked.get(block, 0) + 1
            if count == self._references[block]:
                self._idle += 1

    def unpark(self, table: BlockTable) -> None:
        """Use a parked table again."""
        if table.is_parked:
            self._unpark_blocks(table.blocks)
            table.is_parked = False

    def _unpark_blocks(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            count = self._parked[block]
            if count == self._references[block]:
                self._idle -= 1
            if count == 1:
                del self._parked[block]
            else:
                self._parked[block] = count - 1

    def truncate(self, table: BlockTable, length: int) -> None:
        """Keep the first `length` tokens. Blocks past them are returned, unless other tables hold them.

        Raises:
            ValueError: `length` is negative or more than the table holds, or the block of its last token has left.
        """
        if not 0 <= length <= table.length:
            raise ValueError(f"cannot truncate a table of {table.length} tokens to {length}")
        if 0 < length <= table.first * self.block_size:
            raise ValueError(f"cannot truncate to {length} tokens {table}, whose first blocks have left")
        keep = -(-length // self.block_size) - table.first if length else 0
        dropped = table.blocks[keep:]
        if table.is_parked:
            self._unpark_blocks(dropped)
            table.is_parked = length > 0
        del table.blocks[keep:]
        table.length = length
        if not length:
            table.first = 0
        self._stamp += 1
        self._drop(dropped)

    def release(self, table: BlockTable) -> None:
        """Forget all tokens of the sequence; the table stays usable, empty."""
        self.truncate(table, 0)

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Verify the books against all tables that exist.

        Raises:
            AssertionError: a block is both free and held, lost, listed twice, or counted wrongly, or a table's number
                of blocks does not fit its length. An error here is a fault in this library.
        """
        counts: dict[int, int] = {}
        parked: dict[int, int] = {}
        for table in tables:
            if table.first + len(table.blocks) != -(-table.length // self.block_size):
                raise AssertionError(f"{table} has {len(table.blocks)} blocks of {self.block_size}")
            if len(set(table.blocks)) != len(table.blocks):
                raise AssertionError(f"{table} names a block twice")
            for block in table.blocks:
                counts[block] = counts.get(block, 0) + 1
                if table.is_parked:
                    parked[block] = parked.get(block, 0) + 1
        if parked != self._parked:
            raise AssertionError(f"parked references are {parked}, but counted as {self._parked}")
        if self._idle != sum(count == counts[block] for block, count in parked.items()):
            raise AssertionError(f"{self._idle} blocks counted as held by parked tables alone")
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a block is in the free list twice")
        if len(self._references) != self._fresh or self._fresh > self.num_blocks:
            raise AssertionError(f"{len(self._references)} counts for {self._fresh} blocks of {self.num_blocks}")
        for block in range(self._fresh):
            count = counts.pop(block, 0)
            if self._references[block] != count:
                raise AssertionError(f"block {block}: counted {self._references[block]} times, held by {count} tables")
            if (block in free) != (count == 0):
                raise AssertionError(f"block {block} is held by {count} tables and free is {block in free}")
        if counts:
            raise AssertionError(f"tables name blocks that were never handed out: {sorted(counts)}")
        if self.num_free + self.num_used != self.num_blocks:
            raise AssertionError(f"{self.num_free} free and {self.num_used} used of {self.num_blocks} blocks")

    def _hold(self, blocks: Iterable[int]) -> None:
        references, parked = self._references, self._parked
        for block in blocks:
            if parked and parked.get(block) == references[block]:
                self._idle -= 1
            references[block] += 1

    def _drop(self, blocks: list[int]) -> None:
        references, free, parked = self._references, self._free, self._parked
        for block in reversed(blocks):
            count = references[block] = references[block] - 1
            if count == 0:
                free.append(block)
            elif parked and parked.get(block) == count:
                self._idle += 1


def check_block_size(block_size: int) -> None:
    """Raises `ValueError` unless `block_size` is a power of two from 1 to 256."""
    if (
        isinstance(block_size, bool)
        or not isinstance(block_size, int)
        or not 1 <= block_size <= MAX_BLOCK_SIZE
        or block_size & (block_size - 1)
    ):
        raise ValueError(f"block_size must be a power of two from 1 to {MAX_BLOCK_SIZE}, not {block_size!r}")
