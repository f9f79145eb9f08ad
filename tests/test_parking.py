"""Parked sequences: their blocks count as free, and give way when others need them."""

from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from test_allocator import grown, state

from hf_paged.allocator import BlockAllocator, BlockTable
from hf_paged.errors import OutOfBlocksError


class Parking(RuleBasedStateMachine):
    """Sequences that are grown, shared, parked and used again, in a pool that is too small for all of them."""

    @initialize(block_size=st.sampled_from([1, 4]), num_blocks=st.integers(1, 16))
    def start(self, block_size, num_blocks):
        self.size = block_size
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.allocator.reclaim = self.reclaim
        self.tables: list[BlockTable] = []
        self.tokens: list[list[int]] = []
        self.memory: dict[tuple[int, int], int] = {}
        self.fresh = count()

    def reclaim(self, allocator):
        for table, tokens in zip(self.tables, self.tokens, strict=True):
            if table.is_parked:
                allocator.release(table)
                tokens.clear()
                return True
        return False

    def done(self):
        self.allocator.check(self.tables)
        used = {block for table in self.tables if not table.is_parked for block in table.blocks}
        assert self.allocator.num_used == len(used)
        assert self.allocator.num_free == self.allocator.num_blocks - len(used)
        for table, tokens in zip(self.tables, self.tokens, strict=True):
            places = [(table.blocks[i // self.size], i % self.size) for i in range(table.length)]
            assert [self.memory[place] for place in places] == tokens

    @precondition(lambda self: len(self.tables) < 8)
    @rule()
    def add(self):
        self.tables.append(BlockTable())
        self.tokens.append([])

    @precondition(lambda self: any(not table.is_parked for table in self.tables))
    @rule(number=st.integers(0, 7), added=st.integers(1, 9))
    def grow(self, number, added):
        active = [index for index, table in enumerate(self.tables) if not table.is_parked]
        index = active[number % len(active)]
        table = self.tables[index]
        before = state(self.allocator, *self.tables)
        try:
            growth = self.allocator.grow([table], [added])
        except OutOfBlocksError as error:
            assert error.needed > self.allocator.num_free
            assert state(self.allocator, *self.tables) == before
            self.done()
            return
        for source, copy in growth.copies:
            for slot in range(self.size):
                if (source, slot) in self.memory:
                    self.memory[copy, slot] = self.memory[source, slot]
        for _ in range(added):
            place = len(self.tokens[index])
            self.tokens[index].append(next(self.fresh))
            self.memory[table.blocks[place // self.size], place % self.size] = self.tokens[index][-1]
        self.done()

    @precondition(lambda self: self.tables)
    @rule(number=st.integers(0, 7), parked=st.booleans())
    def park_or_use(self, number, parked):
        table = self.tables[number % len(self.tables)]
        (self.allocator.park if parked else self.allocator.unpark)(table)
        self.done()

    @precondition(lambda self: self.tables and len(self.tables) < 8)
    @rule(number=st.integers(0, 7), keep=st.integers(0, 20), parked=st.booleans())
    def adopt(self, number, keep, parked):
        index = number % len(self.tables)
        length = min(keep, self.tables[index].length)
        blocks = self.tables[index].blocks[: -(-length // self.size)]
        self.tables.append(self.allocator.adopt(blocks, length))
        self.tokens.append(self.tokens[index][:length])
        if parked:
            self.allocator.park(self.tables[-1])
        self.done()

    @precondition(lambda self: self.tables)
    @rule(number=st.integers(0, 7), keep=st.integers(0, 20))
    def truncate(self, number, keep):
        index = number % len(self.tables)
        length = min(keep, self.tables[index].length)
        self.allocator.truncate(self.tables[index], length)
        del self.tokens[index][length:]
        self.done()


def test_parked_sequences_give_way_and_no_others():
    run_state_machine_as_test(
        Parking,
        settings=settings(
            max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_blocks_that_only_parked_sequences_hold_are_free_until_taken():
    allocator = BlockAllocator(4, block_size=4)
    kept, ended = grown(allocator, 4, 12)
    allocator.reclaim = lambda allocator_: allocator.release(ended) is None
    allocator.park(ended)
    assert (allocator.num_used, allocator.num_free, allocator.num_idle) == (1, 3, 3)
    with pytest.raises(OutOfBlocksError):
        allocator.grow([kept], [13])
    assert ended.length == 12  # nothing was taken in vain
    with pytest.raises(ValueError, match="parked"):
        allocator.grow([ended], [1])
    allocator.grow([kept], [1])
    assert (kept.length, ended.length, ended.is_parked) == (5, 0, False)
    allocator.check([kept, ended])


def test_growth_of_a_sequence_that_was_parked_since_is_undone():
    allocator = BlockAllocator(4, block_size=4)
    (table,) = grown(allocator, 4)
    growth = allocator.grow([table], [4])
    allocator.park(table)
    allocator.undo(growth)
    assert (table.length, table.is_parked, allocator.num_idle) == (4, False, 0)
    allocator.check([table])
