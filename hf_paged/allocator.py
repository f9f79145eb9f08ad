"""Blocks, and the tables that map a sequence's tokens to them. Plain Python: no tensors, no models, no devices.

Token `i` of a sequence lives in slot `i % block_size` of block `table.blocks[i // block_size]`. Blocks are counted
references, so that sequences may share them; a sequence that writes into a block which others hold as well gets a
copy of its own first (copy-on-write). The scheme is PagedAttention's (Kwon et al., 2023, arXiv 2309.06180).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hf_paged.errors import OutOfBlocksError

MAX_BLOCK_SIZE = 256


class BlockTable:
    """The blocks of one sequence, in order, and the number of tokens in them.

    Attributes:
        blocks: physical block ids; entry `j` holds tokens `j * block_size` and up.
        length: tokens in the sequence. Only the last block may be partly filled.
    """

    __slots__ = ("blocks", "length")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.length = 0

    def __repr__(self) -> str:
        return f"BlockTable(length={self.length}, blocks={self.blocks})"


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


class BlockAllocator:
    """Hands out the blocks of a pool and counts who holds them.

    Taking and returning blocks costs time in proportion to the blocks touched, whatever the size of the pool: ids that
    were never used are only a watermark, and returned ones a stack, last returned first taken, so that memory which
    is already committed (and likely in a CPU's cache) is used again before new memory is touched. A table is returned
    in an order that makes the next taker's ids ascend, because ascending blocks are read faster.

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
        """The most blocks that were in use at once."""
        self._free: list[int] = []
        self._fresh = 0  # ids from here up were never used
        self._references: list[int] = []  # of ids below _fresh
        self._stamp = 0  # counts changes

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free) + self.num_blocks - self._fresh

    @property
    def num_used(self) -> int:
        """Blocks that at least one table holds."""
        return self._fresh - len(self._free)

    @property
    def high_water(self) -> int:
        """No block from this id up was ever used."""
        return self._fresh

    def references(self, block: int) -> int:
        """How many tables hold `block`."""
        return self._references[block] if block < self._fresh else 0

    def grow(self, tables: Sequence[BlockTable], counts: Sequence[int]) -> Growth:
        """Make room for `counts[i]` more tokens in each `tables[i]`: for all of them, or for none.

        A table takes a block only when its last one is full. A partly filled last block that others hold too is
        replaced by a copy of its own; where every holder of such a block writes in this call, the last one keeps it.

        Args:
            tables: the tables to grow, each at most once.
            counts: tokens to add to each, 0 or more.

        Returns:
            The blocks to copy, the tables that changed, and what `undo` needs.

        Raises:
            OutOfBlocksError: not enough free blocks; nothing has changed.
        """
        size, references = self.block_size, self._references
        growth = Growth()
        plans: list[tuple[int, BlockTable, int, bool]] = []  # index, table, whole new blocks, tail is shared
        needed = 0
        writers: dict[int, int] = {}  # shared tail block -> tables that write into it
        for index, (table, count) in enumerate(zip(tables, counts, strict=True)):
            if count < 0:
                raise ValueError(f"cannot grow a table by {count} tokens; use truncate")
            if count == 0:
                continue
            held = len(table.blocks)
            tail = table.blocks[-1] if table.length % size else None
            if tail is not None and references[tail] > 1:
                writers[tail] = writers.get(tail, 0) + 1
            else:
                tail = None
            new = -(-(table.length + count) // size) - held
            needed += new
            growth.before.append((table, table.length, held, tail))
            if new or tail is not None:
                plans.append((index, table, new, tail is not None))
        for tail, count in writers.items():
            needed += min(count, references[tail] - 1)
        if needed > self.num_free:
            raise OutOfBlocksError(needed, self.num_free, self.num_blocks, size)

        # From here on nothing can fail but an interrupt, which is undone by putting the old values back.
        free, num_free, fresh, peak = self._free, len(self._free), self._fresh, self.peak_used
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
            self._fresh, self.peak_used = fresh, peak
            raise
        return growth

    def undo(self, growth: Growth) -> None:
        """Take back a `grow` whose tables were not touched since.

        A shared block that was replaced by a copy comes back, unless anything happened in between: then its other
        holders may have let it go, or have written to it, and the table keeps the copy.
        """
        untouched = growth.stamp == self._stamp
        self._stamp += 1
        for table, length, held, tail in reversed(growth.before):
            dropped = table.blocks[held:]
            del table.blocks[held:]
            if tail is not None and table.blocks[-1] != tail and untouched:
                dropped.insert(0, table.blocks[-1])
                table.blocks[-1] = tail
                self._references[tail] += 1
            table.length = length
            self._drop(dropped)

    def fork(self, table: BlockTable) -> BlockTable:
        """A second sequence with the same tokens. It shares every block; nothing is copied until one of them writes."""
        twin = BlockTable()
        twin.blocks = list(table.blocks)
        twin.length = table.length
        self._stamp += 1
        references = self._references
        for block in twin.blocks:
            references[block] += 1
        return twin

    def truncate(self, table: BlockTable, length: int) -> None:
        """Keep the first `length` tokens. Blocks past them are returned, unless other tables hold them.

        Raises:
            ValueError: `length` is negative or more than the table holds.
        """
        if not 0 <= length <= table.length:
            raise ValueError(f"cannot truncate a table of {table.length} tokens to {length}")
        keep = -(-length // self.block_size)
        dropped = table.blocks[keep:]
        del table.blocks[keep:]
        table.length = length
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
        for table in tables:
            if len(table.blocks) != -(-table.length // self.block_size):
                raise AssertionError(f"{table} has {len(table.blocks)} blocks of {self.block_size}")
            if len(set(table.blocks)) != len(table.blocks):
                raise AssertionError(f"{table} names a block twice")
            for block in table.blocks:
                counts[block] = counts.get(block, 0) + 1
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

    def _drop(self, blocks: list[int]) -> None:
        references, free = self._references, self._free
        for block in reversed(blocks):
            count = references[block] = references[block] - 1
            if count == 0:
                free.append(block)


def check_block_size(block_size: int) -> None:
    """Raises `ValueError` unless `block_size` is a power of two from 1 to 256."""
    if (
        isinstance(block_size, bool)
        or not isinstance(block_size, int)
        or not 1 <= block_size <= MAX_BLOCK_SIZE
        or block_size & (block_size - 1)
    ):
        raise ValueError(f"block_size must be a power of two from 1 to {MAX_BLOCK_SIZE}, not {block_size!r}")
