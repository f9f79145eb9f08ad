"""The allocator: block tables, reference counts and copy-on-write, without a tensor in sight.

What a table's tokens *are* is followed by a stand-in for the pool's memory: a dict from `(block, slot)` to a token.
Copies are carried out in it as a cache would, so that a block that is shared when it must not be, or not copied when
it must be, shows as a wrong token.
"""

import gc
import linecache
import pickle
import statistics
import sys
import time
import tracemalloc
from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from hf_paged.allocator import BlockAllocator, BlockTable
from hf_paged.errors import OutOfBlocksError


def grown(allocator, *lengths):
    """Tables of these lengths."""
    tables = [BlockTable() for _ in lengths]
    allocator.grow(tables, lengths)
    return tables


def state(allocator, *tables):
    """Everything that a failed operation must leave alone."""
    books = (allocator.num_free, allocator.num_used, allocator.high_water, allocator.peak_used)
    references = [allocator.references(block) for block in range(allocator.high_water)]
    return books, references, list(allocator._free), [(list(table.blocks), table.length) for table in tables]


# The seed example ----------------------------------------------------------------------------------------------------


def test_a_prompt_of_40_tokens_takes_3_blocks_of_16_and_token_49_a_fourth():
    allocator = BlockAllocator(100, block_size=16)
    (table,) = grown(allocator, 40)
    first = list(table.blocks)
    assert (len(first), table.length, allocator.num_used, allocator.num_free) == (3, 40, 3, 97)
    for length in range(41, 49):
        growth = allocator.grow([table], [1])
        assert (table.blocks, table.length, growth.copies, growth.changed) == (first, length, [], [])
    assert allocator.num_free == 97
    growth = allocator.grow([table], [1])
    assert (table.length, len(table.blocks), allocator.num_free) == (49, 4, 96)
    assert table.blocks[:3] == first and table.blocks[3] not in first
    assert growth.changed == [(0, 3)]
    allocator.check([table])


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_a_sequence_never_wastes_a_whole_block(block_size):
    allocator = BlockAllocator(1000, block_size)
    table = BlockTable()
    for step in (1, block_size, 3, 2 * block_size + 1, 7, block_size - 1, 1):
        allocator.grow([table], [step])
        assert 0 <= len(table.blocks) * block_size - table.length <= block_size - 1
        allocator.check([table])


# What is accepted ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [0, -1, -16, 3, 12, 17, 255, 257, 512, True, False, 16.0, "16", None])
def test_a_block_size_that_is_no_power_of_two_up_to_256_is_refused(block_size):
    with pytest.raises(ValueError, match=r"block_size must be a power of two from 1 to 256, not ") as caught:
        BlockAllocator(10, block_size)
    assert repr(block_size) in str(caught.value)


@pytest.mark.parametrize("num_blocks", [0, -1, True, 2.0, "8", None])
def test_a_number_of_blocks_that_is_no_positive_integer_is_refused(num_blocks):
    with pytest.raises(ValueError, match=r"num_blocks must be an integer of at least 1, not ") as caught:
        BlockAllocator(num_blocks)
    assert repr(num_blocks) in str(caught.value)


def test_growing_by_a_negative_count_is_refused_and_changes_nothing():
    allocator = BlockAllocator(10, 4)
    tables = grown(allocator, 5, 6)
    before = state(allocator, *tables)
    with pytest.raises(ValueError, match="truncate"):
        allocator.grow(tables, [4, -1])
    assert state(allocator, *tables) == before


def test_growing_with_another_number_of_counts_than_tables_is_refused_and_changes_nothing():
    allocator = BlockAllocator(10, 4)
    tables = grown(allocator, 5, 6)
    before = state(allocator, *tables)
    with pytest.raises(ValueError):
        allocator.grow(tables, [4])
    assert state(allocator, *tables) == before


@pytest.mark.parametrize("length", [-1, 7, 100])
def test_truncating_to_a_length_out_of_range_is_refused_and_changes_nothing(length):
    allocator = BlockAllocator(10, 4)
    (table,) = grown(allocator, 6)
    before = state(allocator, table)
    with pytest.raises(ValueError, match="6 tokens"):
        allocator.truncate(table, length)
    assert state(allocator, table) == before


def test_growing_by_nothing_changes_nothing():
    allocator = BlockAllocator(10, 4)
    (table,) = grown(allocator, 6)
    twin = allocator.fork(table)
    before = state(allocator, table, twin)
    growth = allocator.grow([table, BlockTable()], [0, 0])
    assert (growth.copies, growth.changed) == ([], [])
    assert state(allocator, table, twin) == before


# All or nothing ------------------------------------------------------------------------------------------------------


def test_growth_that_does_not_fit_takes_nothing_for_any_table_and_says_what_was_missing():
    allocator = BlockAllocator(8, block_size=4)
    a, b = grown(allocator, 10, 4)  # 3 blocks and 1
    twin = allocator.fork(a)
    before = state(allocator, a, b, twin)
    with pytest.raises(OutOfBlocksError) as caught:
        allocator.grow([b, a], [8, 7])  # 2 blocks, then 2 and a copy of the shared tail
    error = caught.value
    assert (error.needed, error.free, error.total, error.block_size) == (5, 4, 8, 4)
    message = str(error)
    assert "needs 5 more blocks of 4 tokens" in message and "only 4 of 8 are free" in message
    assert "32 tokens" in message and "Nothing was changed" in message
    assert "num_blocks" in message and "cache.release(rows)" in message
    assert state(allocator, a, b, twin) == before
    allocator.check([a, b, twin])
    allocator.grow([b, a], [8, 6])  # what fits is still served
    assert allocator.num_free == 0
    allocator.check([a, b, twin])


def test_one_missing_block_is_told_in_the_singular():
    allocator = BlockAllocator(1, 16)
    grown(allocator, 16)
    with pytest.raises(OutOfBlocksError, match=r"needs 1 more block of 16 tokens"):
        allocator.grow([BlockTable()], [1])


def test_the_error_survives_pickling():
    error = pickle.loads(pickle.dumps(OutOfBlocksError(3, 2, 8, 16)))
    assert (error.needed, error.free, error.total, error.block_size) == (3, 2, 8, 16)
    assert str(error) == str(OutOfBlocksError(3, 2, 8, 16))


def test_the_last_block_can_be_taken():
    allocator = BlockAllocator(3, 4)
    (table,) = grown(allocator, 12)
    assert (allocator.num_free, sorted(table.blocks)) == (0, [0, 1, 2])
    allocator.check([table])


# Sharing -------------------------------------------------------------------------------------------------------------


def test_a_fork_takes_no_block_and_counts_every_block_twice():
    allocator = BlockAllocator(10, 4)
    (table,) = grown(allocator, 10)
    twin = allocator.fork(table)
    assert twin is not table and twin.blocks is not table.blocks
    assert (twin.blocks, twin.length, allocator.num_used) == (table.blocks, 10, 3)
    assert [allocator.references(block) for block in table.blocks] == [2, 2, 2]
    allocator.check([table, twin])


def test_writing_after_a_fork_copies_the_partly_filled_last_block_and_no_other():
    allocator = BlockAllocator(10, 4)
    (table,) = grown(allocator, 10)
    twin = allocator.fork(table)
    shared = list(table.blocks)
    growth = allocator.grow([twin], [1])
    assert growth.copies == [(shared[2], twin.blocks[2])]
    assert growth.changed == [(0, 2)]
    assert twin.blocks[:2] == shared[:2] and twin.blocks[2] not in shared and table.blocks == shared
    assert [allocator.references(block) for block in shared] == [2, 2, 1]
    assert allocator.grow([table], [1]).copies == []  # the last holder writes where it is
    assert table.blocks == shared
    allocator.check([table, twin])


def test_writing_after_a_fork_of_full_blocks_copies_nothing():
    allocator = BlockAllocator(10, 4)
    (table,) = grown(allocator, 8)
    twin = allocator.fork(table)
    growth = allocator.grow([table, twin], [1, 1])
    assert (growth.copies, growth.changed) == ([], [(0, 2), (1, 2)])
    assert table.blocks[:2] == twin.blocks[:2] and table.blocks[2] != twin.blocks[2]
    allocator.check([table, twin])


def test_when_every_holder_writes_at_once_the_last_one_keeps_the_block():
    allocator = BlockAllocator(4, 4)
    (table,) = grown(allocator, 2)
    tables = [table, allocator.fork(table), allocator.fork(table)]
    tail = table.blocks[0]
    growth = allocator.grow(tables, [1, 1, 1])  # two copies: four blocks would do, three more would not fit
    assert [source for source, _ in growth.copies] == [tail, tail]
    assert tables[2].blocks == [tail] and allocator.num_used == 3
    assert len({table.blocks[0] for table in tables}) == 3
    allocator.check(tables)


def test_copies_that_are_needed_count_against_the_free_blocks():
    allocator = BlockAllocator(2, 4)
    (table,) = grown(allocator, 2)
    tables = [table, allocator.fork(table), allocator.fork(table)]
    before = state(allocator, *tables)
    with pytest.raises(OutOfBlocksError) as caught:
        allocator.grow(tables, [1, 1, 1])
    assert (caught.value.needed, caught.value.free) == (2, 1)
    assert state(allocator, *tables) == before


def test_truncating_into_shared_blocks_leaves_the_other_holder_alone():
    allocator = BlockAllocator(10, 4)
    (table,) = grown(allocator, 14)
    twin = allocator.fork(table)
    shared = list(table.blocks)
    allocator.truncate(twin, 5)
    assert (twin.blocks, twin.length) == (shared[:2], 5)
    assert (table.blocks, table.length, allocator.num_used) == (shared, 14, 4)
    assert [allocator.references(block) for block in shared] == [2, 2, 1, 1]
    growth = allocator.grow([twin], [1])  # its last block is partly filled now, and full for the other
    assert growth.copies == [(shared[1], twin.blocks[1])]
    assert table.blocks == shared
    allocator.check([table, twin])


@pytest.mark.parametrize(("length", "blocks"), [(9, 3), (8, 2), (5, 2), (4, 1), (1, 1), (0, 0)])
def test_truncating_frees_the_blocks_that_hold_nothing_more(length, blocks):
    allocator = BlockAllocator(10, 4)
    (table,) = grown(allocator, 10)
    before = list(table.blocks)
    allocator.truncate(table, length)
    assert (table.length, table.blocks, allocator.num_used) == (length, before[:blocks], blocks)
    allocator.check([table])


def test_a_released_table_is_empty_and_can_be_used_again():
    allocator = BlockAllocator(3, 4)
    (table,) = grown(allocator, 12)
    allocator.release(table)
    assert (table.blocks, table.length, allocator.num_free, allocator.peak_used) == ([], 0, 3, 3)
    allocator.grow([table], [12])
    allocator.check([table])


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go():
    allocator = BlockAllocator(10, 4)
    (table,) = grown(allocator, 8)
    twins = [allocator.fork(table) for _ in range(3)]
    for left, holder in zip((3, 2, 1, 0), [table, *twins], strict=True):
        assert allocator.num_used == 2
        allocator.release(holder)
        assert allocator.references(0) == left
    assert allocator.num_used == 0


def test_a_table_taken_again_after_a_release_has_ascending_blocks():
    allocator = BlockAllocator(64, 4)
    a, b, c = grown(allocator, 40, 40, 40)
    for table in (b, a):
        allocator.release(table)
        allocator.grow([table], [40])
        assert table.blocks == sorted(table.blocks)
    allocator.check([a, b, c])


def test_blocks_that_were_used_are_taken_before_fresh_ones():
    allocator = BlockAllocator(100, 4)
    (table,) = grown(allocator, 20)
    allocator.release(table)
    (again,) = grown(allocator, 16)
    assert allocator.high_water == 5 and set(again.blocks) < set(range(5))


def test_the_peak_stays_when_blocks_go_back():
    allocator = BlockAllocator(100, 4)
    a, b = grown(allocator, 20, 8)
    allocator.release(a)
    allocator.grow([b], [4])
    assert (allocator.num_used, allocator.peak_used) == (3, 7)


# Undo ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writers", [(0,), (1,), (0, 1), (0, 1, 2), (2, 1), (3,), (0, 3), (4,), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_undo_puts_tables_and_counts_back_and_the_same_growth_again_takes_the_same_blocks(writers, count):
    allocator = BlockAllocator(60, 4)
    table, lonely, gone = grown(allocator, 10, 7, 9)
    allocator.release(gone)
    tables = [table, allocator.fork(table), allocator.fork(table), lonely, BlockTable()]
    _, references, _, contents = state(allocator, *tables)
    used = allocator.num_used
    chosen = [tables[writer] for writer in writers]
    growth = allocator.grow(chosen, [count] * len(chosen))
    after = state(allocator, *tables)[3]
    assert after != contents
    allocator.undo(growth)
    _, references_now, _, contents_now = state(allocator, *tables)
    assert contents_now == contents and allocator.num_used == used
    assert references_now[: len(references)] == references and not any(references_now[len(references) :])
    allocator.check(tables)
    again = allocator.grow(chosen, [count] * len(chosen))
    assert (again.copies, again.changed) == (growth.copies, growth.changed)
    assert state(allocator, *tables)[3] == after
    allocator.check(tables)


def test_undo_is_right_when_the_other_holder_of_a_copied_block_let_go_meanwhile():
    allocator = BlockAllocator(10, 4)
    (table,) = grown(allocator, 6)
    twin = allocator.fork(table)
    growth = allocator.grow([table], [1])
    allocator.release(twin)
    allocator.undo(growth)
    assert table.length == 6
    allocator.check([table, twin])


# Interrupts ----------------------------------------------------------------------------------------------------------


class InterruptedList(list):
    """Raises at the `left`-th change to come."""

    left = 0

    def _change(self):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def append(self, item):
        self._change()
        super().append(item)

    def __setitem__(self, index, item):
        self._change()
        super().__setitem__(index, item)


def mixed_tables(allocator):
    """Tables of every kind: sharing a partly filled block, alone, full, empty; with blocks free that were used."""
    table, lonely, full, gone = grown(allocator, 10, 7, 8, 17)
    allocator.release(gone)
    return [table, allocator.fork(table), allocator.fork(table), lonely, full, BlockTable()]


@pytest.mark.parametrize("left", range(1, 5))
@pytest.mark.parametrize("victim", range(6))
def test_an_interrupt_while_a_table_is_changed_leaves_everything_as_before(victim, left):
    allocator = BlockAllocator(60, 4)
    tables = mixed_tables(allocator)
    tables[victim].blocks = InterruptedList(tables[victim].blocks)
    before = state(allocator, *tables)
    tables[victim].blocks.left = left
    try:
        allocator.grow(tables, [13] * len(tables))
    except KeyboardInterrupt:
        assert state(allocator, *tables) == before
    else:
        assert left == 4 and victim in (2, 3), "the others change four entries or more"
    tables[victim].blocks.left = 0
    allocator.check(tables)


@pytest.mark.parametrize("leaving", [False, True])
def test_an_interrupt_at_any_line_of_grow_leaves_everything_as_before(leaving):
    """Also where blocks leave at the beginning."""
    functions = (BlockAllocator.grow, BlockAllocator._grow, BlockAllocator._leave, BlockAllocator._drop)
    codes = {function.__code__ for function in functions}
    start = [8, 4, 4, 0, 4, 0] if leaving else None
    tracer = sys.gettrace()
    interrupted = set()
    for stop in count(1):
        allocator = BlockAllocator(60, 4)
        tables = mixed_tables(allocator)
        before = state(allocator, *tables)
        seen = 0

        def trace(frame, event, arg, stop=stop):
            nonlocal seen
            if frame.f_code not in codes:
                return None
            returns = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip().startswith("return")
            if event == "line" and not returns:  # it is done then
                seen += 1
                if seen == stop:
                    interrupted.add(frame.f_lineno)
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            allocator.grow(tables, [1, 9, 5, 20, 1, 6], start)
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.settrace(tracer)
        assert state(allocator, *tables) == before, f"interrupted at line {max(interrupted)}"
        allocator.check(tables)
    assert len(interrupted) > 30  # the lines were really visited


# The books' own check ------------------------------------------------------------------------------------------------


def _lose(allocator, a, b):
    allocator._free.pop()


def _free_twice(allocator, a, b):
    allocator._free.append(allocator._free[-1])


def _free_a_held_one(allocator, a, b):
    allocator._free.append(a.blocks[0])


def _count_too_many(allocator, a, b):
    allocator._references[a.blocks[0]] += 1


def _share_uncounted(allocator, a, b):
    b.blocks[0] = a.blocks[0]


def _name_twice(allocator, a, b):
    a.blocks[1] = a.blocks[0]


def _too_short(allocator, a, b):
    a.length += 4


def _never_handed_out(allocator, a, b):
    a.blocks[0] = 50


@pytest.mark.parametrize(
    "damage",
    [
        _lose,
        _free_twice,
        _free_a_held_one,
        _count_too_many,
        _share_uncounted,
        _name_twice,
        _too_short,
        _never_handed_out,
    ],
)
def test_check_notices_damaged_books(damage):
    allocator = BlockAllocator(60, 4)
    a, b, gone = grown(allocator, 8, 8, 8)
    allocator.release(gone)
    allocator.check([a, b])
    damage(allocator, a, b)
    with pytest.raises(AssertionError):
        allocator.check([a, b])


# Random operations ---------------------------------------------------------------------------------------------------

operations = 0


class Paging(RuleBasedStateMachine):
    """Random operations on several sequences, against lists of tokens that are copied instead of shared."""

    @initialize(block_size=st.sampled_from([1, 2, 4, 8, 16]), num_blocks=st.integers(1, 24))
    def start(self, block_size, num_blocks):
        self.size, self.num_blocks = block_size, num_blocks
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.tables: list[BlockTable] = []
        self.tokens: list[list[int]] = []  # of each table, what it must hold
        self.memory: dict[tuple[int, int], int] = {}
        self.fresh = count()
        self.undoable = []  # growths whose tables were not touched since: growth, and its tables, tokens and blocks
        self.last_growth = None  # the one after which nothing happened at all

    # What must be true, worked out from the lists and the tables alone.

    def holders(self):
        counts = {}
        for table in self.tables:
            for block in table.blocks:
                counts[block] = counts.get(block, 0) + 1
        return counts

    def done(self):
        global operations
        operations += 1
        self.allocator.check(self.tables)
        held = self.holders()
        assert self.allocator.num_used == len(held)
        assert self.allocator.num_free == self.num_blocks - len(held)
        assert self.allocator.peak_used >= len(held)
        for table, tokens in zip(self.tables, self.tokens, strict=True):
            assert table.length == len(tokens)
            places = [(table.blocks[i // self.size], i % self.size) for i in range(table.length)]
            assert [self.memory[place] for place in places] == tokens

    def pick(self, number):
        return number % len(self.tables)

    def touch(self, *tables):
        self.last_growth = None
        self.undoable = [
            entry for entry in self.undoable if not any(old is new for old, _, _ in entry[1] for new in tables)
        ]

    @precondition(lambda self: len(self.tables) < 8)
    @rule()
    def add(self):
        self.tables.append(BlockTable())
        self.tokens.append([])
        self.done()

    @precondition(lambda self: self.tables)
    @rule(
        picks=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 12)), min_size=1, max_size=5),
        stretch=st.sampled_from([1, 1, 1, 5]),
    )
    def grow(self, picks, stretch):
        counts = {self.pick(number): count * stretch for number, count in picks}
        tables = [self.tables[index] for index in counts]
        tokens_before = [list(self.tokens[index]) for index in counts]
        blocks_before = [list(table.blocks) for table in tables]
        before = [(list(table.blocks), table.length) for table in self.tables]
        held = self.holders()
        tails = {}
        needed = 0
        for index, added in counts.items():
            blocks, length = before[index]
            needed += -(-(length + added) // self.size) - len(blocks)
            if added and length % self.size:
                tails[blocks[-1]] = tails.get(blocks[-1], 0) + 1
        copies = {tail: min(writers, held[tail] - 1) for tail, writers in tails.items() if held[tail] > 1}
        needed += sum(copies.values())
        if needed > self.num_blocks - len(held):
            books = state(self.allocator, *self.tables)
            with pytest.raises(OutOfBlocksError) as caught:
                self.allocator.grow(tables, list(counts.values()))
            assert (caught.value.needed, caught.value.free) == (needed, self.num_blocks - len(held))
            assert state(self.allocator, *self.tables) == books
            self.done()
            return
        growth = self.allocator.grow(tables, list(counts.values()))
        assert {(source, copy) for source, copy in growth.copies if copy in held} == set()
        assert sorted(source for source, _ in growth.copies) == sorted(t for t, n in copies.items() for _ in range(n))
        changed = dict(growth.changed)
        for number, index in enumerate(counts):
            old, new = before[index][0], self.tables[index].blocks
            same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), len(old))
            assert changed.get(number, len(new)) == same
        for index, (blocks, length) in enumerate(before):
            if index not in counts:
                assert (self.tables[index].blocks, self.tables[index].length) == (blocks, length)
        self.touch(*tables)
        self.last_growth = growth
        self.undoable.append((growth, list(zip(tables, tokens_before, blocks_before, strict=True))))
        for source, copy in growth.copies:
            for slot in range(self.size):
                self.memory.pop((copy, slot), None)
                if (source, slot) in self.memory:
                    self.memory[copy, slot] = self.memory[source, slot]
        for index, added in counts.items():
            table, tokens = self.tables[index], self.tokens[index]
            for _ in range(added):
                place = len(tokens)
                tokens.append(next(self.fresh))
                self.memory[table.blocks[place // self.size], place % self.size] = tokens[-1]
        self.done()

    @precondition(lambda self: self.undoable)
    @rule(number=st.integers(0, 3))
    def undo(self, number):
        growth, before = self.undoable.pop(-1 - number % len(self.undoable))
        self.allocator.undo(growth)
        for table, tokens, blocks in before:
            index = next(index for index, other in enumerate(self.tables) if other is table)
            self.tokens[index] = tokens
            assert len(table.blocks) == len(blocks)
            if growth is self.last_growth:
                assert table.blocks == blocks
        self.last_growth = None
        self.done()

    @precondition(lambda self: self.tables and len(self.tables) < 8)
    @rule(number=st.integers(0, 7))
    def fork(self, number):
        index = self.pick(number)
        self.touch(self.tables[index])
        used = self.allocator.num_used
        self.tables.append(self.allocator.fork(self.tables[index]))
        self.tokens.append(list(self.tokens[index]))
        assert self.allocator.num_used == used
        self.done()

    @precondition(lambda self: self.tables)
    @rule(number=st.integers(0, 7), share=st.integers(0, 8))
    def truncate(self, number, share):
        index = self.pick(number)
        self.touch(self.tables[index])
        length = len(self.tokens[index]) * share // 8
        self.allocator.truncate(self.tables[index], length)
        del self.tokens[index][length:]
        self.done()

    @precondition(lambda self: self.tables)
    @rule(number=st.integers(0, 7), forget=st.booleans())
    def release(self, number, forget):
        index = self.pick(number)
        self.touch(self.tables[index])
        self.allocator.release(self.tables[index])
        self.tokens[index] = []
        if forget:
            del self.tables[index], self.tokens[index]
        self.done()


def test_random_operations_keep_the_books_and_every_token():
    global operations
    operations = 0
    run_state_machine_as_test(
        Paging,
        settings=settings(
            max_examples=200,
            stateful_step_count=100,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert operations >= 10_000


# Cost ----------------------------------------------------------------------------------------------------------------


def busy_allocator(num_blocks):
    """Half of its blocks in use, a quarter used before and free, in no order, and a quarter fresh."""
    allocator = BlockAllocator(num_blocks, 1)
    (held,) = grown(allocator, num_blocks // 2)
    parts = grown(allocator, *[num_blocks // 64] * 16)
    for index in (7, 3, 11, 0, 14, 5, 9, 1, 12, 6, 10, 2, 15, 4, 8, 13):
        allocator.release(parts[index])
    return allocator, held


def test_taking_and_returning_blocks_costs_the_same_in_a_pool_of_any_size():
    pools = {size: busy_allocator(size) for size in (1_000, 100_000, 1_000_000)}
    times = {size: [] for size in pools}
    gc.collect()
    gc.disable()
    try:
        for _ in range(300):  # in turns, so that a slow moment of the machine slows all of them
            for size, (allocator, _) in pools.items():
                table = BlockTable()
                began = time.perf_counter()
                growth = allocator.grow([table], [64])
                allocator.undo(growth)
                allocator.grow([table], [64])
                twin = allocator.fork(table)
                allocator.truncate(table, 32)
                allocator.release(table)
                allocator.release(twin)
                times[size].append(time.perf_counter() - began)
    finally:
        gc.enable()
    medians = {size: statistics.median(samples) for size, samples in times.items()}
    assert max(medians.values()) < 5 * min(medians.values()), medians


def test_an_allocator_of_a_million_blocks_is_made_at_once_and_takes_no_memory():
    tracemalloc.start()
    try:
        began = time.perf_counter()
        allocator = BlockAllocator(1_000_000, 16)
        elapsed = time.perf_counter() - began
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert allocator.num_free == 1_000_000
    assert elapsed < 0.05 and peak < 10_000
