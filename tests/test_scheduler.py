"""The scheduler alone: which sequences are fed, which wait, which give way. No model runs."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paged import BlockPool, OutOfBlocksError, RequestTooLongError
from hf_paged.allocator import BlockTable
from hf_paged.batching.batcher import AGING
from hf_paged.batching.scheduler import Scheduler
from hf_paged.batching.sequences import Sequence
from hf_paged.pool import LayerGroup
from hf_paged.rows import Rows

FULL = LayerGroup("full_attention", None, (0, 1))
WINDOW = LayerGroup("sliding_attention", 8, (2,))


def scheduler(num_blocks=16, block_size=4, tokens=16, rows=8, groups=(FULL,), prefix_cache=False) -> Scheduler:
    pool = BlockPool(block_size=block_size, num_blocks=num_blocks, prefix_cache=prefix_cache)
    pool.bind(groups)
    return Scheduler(pool, tokens, rows, keeps_prompts=prefix_cache)


def sequence(of: Scheduler, prompt, number=0, order=None, max_length=1000) -> Sequence:
    ids = list(range(100 * number, 100 * number + prompt)) if isinstance(prompt, int) else prompt
    rules = SimpleNamespace(max_length=max_length)
    return Sequence(ids, rules, order or (0, number, 0), len(of.pool.groups))


def advance(of: Scheduler, take=lambda s: 7) -> list[tuple[Sequence, int]]:
    """One step, with a token for whoever has stored all; what was fed."""
    found = of.next_step()
    if found is None:
        return []
    step, sequences = found
    for s in sequences:
        if s.num_pending == 0:
            if s.num_new == 0:
                of.keep(s)
                for sibling in of.spawn(s):
                    sibling.tokens.append(take(sibling))
            s.tokens.append(take(s))
            if len(s.tokens) >= s.rules.max_length:
                of.remove(s)
    return list(zip(sequences, step.counts, strict=True))


def check(of: Scheduler, *more: Sequence) -> None:
    everyone = [*of.running, *of.waiting, *more]
    kept = of.pool.prefixes.tables if of.pool.prefixes else [[] for _ in of.pool.allocators]
    for group, allocator in enumerate(of.pool.allocators):
        allocator.check([*(s.tables[group] for s in everyone), *kept[group]])


def test_decoding_rows_come_first_and_prompts_share_what_is_left_of_the_budget():
    s = scheduler(num_blocks=100, tokens=16)
    a, b, c = (sequence(s, n, i) for i, n in enumerate((5, 30, 4)))
    for each in (a, b, c):
        s.add(each)
    assert advance(s) == [(a, 5), (b, 11)]
    assert advance(s) == [(a, 1), (b, 15)]
    assert advance(s) == [(a, 1), (b, 4), (c, 4)]
    assert advance(s) == [(a, 1), (b, 1), (c, 1)]


def test_a_last_token_of_a_prompt_goes_with_the_single_ones():
    s = scheduler(num_blocks=100, tokens=8)
    a, b = sequence(s, 9, 0), sequence(s, 7, 1)
    s.add(a), s.add(b)
    assert advance(s) == [(a, 8)]
    step, sequences = s.next_step()
    assert step.counts == [1, 7] and sequences == [a, b]
    assert [(x.start, x.rows, x.q_len) for x in step.segments] == [(0, 1, 1), (1, 1, 7)]


def test_no_more_rows_than_allowed():
    s = scheduler(num_blocks=100, rows=2)
    rows = [sequence(s, 2, i, max_length=4) for i in range(3)]
    for each in rows:
        s.add(each)
    assert [x for x, _ in advance(s)] == rows[:2]
    assert [x for x, _ in advance(s)] == rows[:2]
    assert [x for x, _ in advance(s)] == rows[2:]


def test_a_prompt_is_admitted_when_all_of_it_fits_beside_what_is_promised():
    s = scheduler(num_blocks=8, tokens=8)  # 32 tokens
    long, short = sequence(s, 24, 0, max_length=25), sequence(s, 12, 1)
    s.add(long), s.add(short)
    assert advance(s) == [(long, 8)]  # the blocks of its other 16 tokens are promised
    assert advance(s) == [(long, 8)]
    assert advance(s) == [(long, 8)]
    assert advance(s) == [(short, 8)]


def test_first_come_first_served_even_if_a_later_one_would_fit():
    s = scheduler(num_blocks=8, tokens=64)
    first, big, small = sequence(s, 20, 0), sequence(s, 16, 1), sequence(s, 1, 2)
    for each in (first, big, small):
        s.add(each)
    assert [x for x, _ in advance(s)] == [first]
    assert s.waiting == [big, small]


def test_the_youngest_gives_way_and_goes_on_later_with_its_tokens():
    s = scheduler(num_blocks=4, tokens=64)
    a, b = sequence(s, 7, 0, max_length=14), sequence(s, 7, 1, max_length=14)
    s.add(a), s.add(b)
    while not b.preemptions:
        advance(s)
        check(s)
    assert s.running == [a] and s.waiting == [b] and not b.tables[0].blocks
    before = list(b.tokens)
    while s.running == [a]:
        assert advance(s)
    while not b.ended:
        advance(s)
        check(s)
    assert a.ended and b.tokens[: len(before)] == before and len(b.tokens) == 14
    assert s.pool.allocators[0].num_used == 0


def test_a_priority_goes_ahead_and_the_others_still_get_their_turn():
    """Requests of a high priority come without end, and the one of a low priority is served all the same."""
    s = scheduler(num_blocks=100, rows=1)
    low = sequence(s, 3, 0, order=(0, 0, 0), max_length=4)
    s.add(low)
    served = 0
    for step in range(1, 4 * AGING):
        s.add(sequence(s, 3, step, order=(step - AGING, step, 0), max_length=4))
        for fed, _ in advance(s):
            served += fed is not low
        if low.ended:
            break
    assert low.ended and served > AGING // 2


def test_what_can_never_fit_is_refused():
    s = scheduler(num_blocks=4)
    s.check(17)  # the 17th token is never fed
    with pytest.raises(RequestTooLongError, match=r"18 tokens.*5 blocks.*4 in all.*max_new_tokens"):
        s.check(18)


def test_a_window_bounds_what_a_sequence_needs():
    s = scheduler(num_blocks=8, groups=(WINDOW,), tokens=8)
    s.check(10_000)
    long = sequence(s, 200, max_length=210)
    s.add(long)
    while not long.ended:
        advance(s)
        check(s)
    assert s.pool.allocators[0].peak_used <= 5


def test_a_prompt_that_begins_like_one_being_computed_waits_for_its_blocks():
    s = scheduler(num_blocks=32, tokens=8, prefix_cache=True)
    shared = list(range(12))
    a, b, other = sequence(s, [*shared, 50], 0), sequence(s, [*shared, 60, 61], 1), sequence(s, 5, 2)
    for each in (a, b, other):
        s.add(each)
    assert advance(s) == [(a, 8)]
    assert advance(s) == [(a, 5), (other, 3)]  # not held up by the one that waits
    assert advance(s) == [(a, 1), (other, 2), (b, 2)]
    assert b.cached_tokens == 12 and b.tables[0].blocks[:3] == a.tables[0].blocks[:3]
    check(s)


def test_samples_share_the_blocks_of_their_prompt_until_they_write():
    s = scheduler(num_blocks=32)
    first, *others = (sequence(s, list(range(10)), 0, order=(0, 0, i)) for i in range(3))
    first.siblings = others
    s.add(first)
    assert advance(s) == [(first, 10)]
    assert s.running == [first, *others] and s.pool.allocators[0].num_used == 3
    assert all(other.tables[0].blocks == first.tables[0].blocks for other in others)
    advance(s)
    assert s.pool.allocators[0].num_used == 2 + 3  # each has a last block of its own
    check(s)


def test_samples_for_whom_there_is_no_row_wait():
    s = scheduler(num_blocks=32, rows=2)
    first, *others = (sequence(s, list(range(10)), 0, order=(0, 0, i), max_length=12) for i in range(3))
    first.siblings = others
    s.add(first)
    advance(s)
    assert s.running == [first, others[0]] and s.waiting == [others[1]]
    while s.running or s.waiting:
        advance(s)
    assert all(len(each.tokens) == 12 for each in (first, *others))


def test_samples_go_on_without_a_first_one_that_was_cancelled():
    s = scheduler()
    first, other, gone = (sequence(s, list(range(10)), 0, order=(0, 0, i)) for i in range(3))
    first.siblings = [other, gone]
    s.add(first)
    s.remove(gone)
    s.remove(first)
    assert s.waiting == [other]
    assert advance(s) == [(other, 10)]


def test_where_others_hold_the_blocks_it_says_so():
    s = scheduler(num_blocks=4)
    foreign = BlockTable()
    s.pool.allocators[0].grow([foreign], [12])
    s.add(sequence(s, 8))
    with pytest.raises(OutOfBlocksError):
        s.next_step()
    s.pool.allocators[0].release(foreign)
    assert len(advance(s)) == 1


def test_blocks_of_others_that_nobody_can_reach_are_found():
    s = scheduler(num_blocks=4)
    lost = Rows(s.pool, 1)
    lost.tables, lost.itself = [[BlockTable()]], lost
    s.pool.allocators[0].grow(lost.tables[0], [12])
    s.add(sequence(s, 8))
    del lost
    assert len(advance(s)) == 1
    assert s.pool.allocators[0].num_used == 2


def test_blocks_that_nobody_can_reach_are_found_for_the_only_one_that_runs():
    s = scheduler(num_blocks=4)
    a = sequence(s, 8)
    s.add(a)
    assert advance(s) == [(a, 8)]
    lost = Rows(s.pool, 1)
    lost.tables, lost.itself = [[BlockTable()]], lost
    s.pool.allocators[0].grow(lost.tables[0], [8])
    del lost
    assert advance(s) == [(a, 1)] and a.preemptions == 0
    assert s.pool.allocators[0].num_used == 3


def test_an_undone_step_has_stored_nothing():
    s = scheduler(num_blocks=16, groups=(FULL, WINDOW))
    a, b = sequence(s, 20, 0), sequence(s, 3, 1)
    s.add(a), s.add(b)
    advance(s)
    before = [(x.tables[0].blocks[:], x.num_stored) for x in (a, b)]
    step, _ = s.next_step()
    step.undo()
    assert [(x.tables[0].blocks, x.num_stored) for x in (a, b)] == before
    assert a.tables[1].length == 16 and a.tables[1].first == 2  # what left the window is needed by no later step
    check(s)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20), prefix_cache=st.booleans(), groups=st.sampled_from([(FULL,), (FULL, WINDOW)]))
def test_random_work_ends_with_every_block_free(seed, prefix_cache, groups):
    """Arrivals, cancellations and ends at random in a tiny pool: books right after each step, all requests served with
    the tokens that they would have had alone, and no block lost."""
    dice = random.Random(seed)
    s = scheduler(num_blocks=12, tokens=dice.choice((4, 9, 32)), rows=4, groups=groups, prefix_cache=prefix_cache)
    live, number = [], 0
    for _ in range(60):
        if dice.random() < 0.4:
            length = dice.randint(1, 20)
            ids = [dice.randint(0, 1) for _ in range(length)]
            new = sequence(s, ids, order=(number - dice.choice((0, 0, AGING)), number, 0), max_length=length + 20)
            s.check(new.rules.max_length)
            new.siblings = [
                sequence(s, ids, order=(*new.order[:2], i), max_length=length + 20)
                for i in range(1, dice.randint(1, 3))
            ]
            s.add(new)
            live += [new, *new.siblings]
            number += 1
        if live and dice.random() < 0.1:
            s.remove(live.pop(dice.randrange(len(live))))
        advance(s, take=lambda x: len(x.tokens))
        check(s)
        live = [x for x in live if not x.ended]
    for _ in range(2000):
        if not (s.running or s.waiting):
            break
        advance(s, take=lambda x: len(x.tokens))
        check(s)
    assert all(x.ended and x.tokens[x.num_prompt :] == list(range(x.num_prompt, len(x.tokens))) for x in live)
    if s.pool.prefixes is not None:
        s.pool.forget_prompts()
    assert all(allocator.num_free == allocator.num_blocks for allocator in s.pool.allocators)
