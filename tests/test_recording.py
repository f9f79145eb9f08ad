"""Recordings: the figures of every step are those of the allocator at that step, whatever ends it."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import threading
import weakref

import pytest
import torch
from transformers import LogitsProcessor

from hf_paged import BlockPool, ContinuousBatcher, OutOfBlocksError, PagedCache, enable_paged_attention, record
from hf_paged.recording import StepRecord
from tests.helpers import (
    VOCAB,
    assert_unchanged,
    build_model,
    check_books,
    forward,
    generate,
    random_prompts,
    run_way,
    snapshot,
)

SIZE = 4
LENGTHS = (5, 11, 3)


@pytest.fixture(scope="module")
def model():
    return enable_paged_attention(build_model("llama"))


def make_cache(model, num_blocks: int = 64, **options) -> PagedCache:
    return PagedCache(model.config, num_blocks=num_blocks, block_size=SIZE, **options)


def blocks(tokens: int) -> int:
    return -(-tokens // SIZE)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]


# generate() ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ("plain", "cpu", "reference", "compiled"))
def test_every_step_of_generate_has_its_true_occupancy(way):
    model = build_model("llama")
    cache = make_cache(model)
    ids, mask = random_prompts(LENGTHS)
    lengths = LENGTHS if way != "plain" else (max(LENGTHS),) * 3  # without the mask, padding is stored
    with run_way(model, way), record(cache, tables=True) as recording:
        generate(model, ids, mask, cache, max_new_tokens=9)
    steps = recording.steps
    assert [one.number for one in steps] == list(range(9))  # the last token is never fed
    for step, one in enumerate(steps):
        assert one.tokens == sum(lengths) + 3 * step
        assert one.new_tokens == (3 if step else sum(lengths))
        assert one.used_blocks == sum(blocks(length + step) for length in lengths)
        assert one.free_blocks == 64 - one.used_blocks
        assert (one.rows, one.shared_blocks, one.kept_blocks, one.total_blocks, one.undone) == (3, 0, 0, 64, False)
        tables = one.block_tables["full_attention"]
        assert [len(tables[f"row {row}"]) for row in range(3)] == [blocks(length + step) for length in lengths]
    assert [list(t) for t in steps[-1].block_tables["full_attention"].values()] == cache.block_tables["full_attention"]
    assert recording.peak is steps[-1] or recording.peak.used_blocks == steps[-1].used_blocks
    seconds = [one.seconds for one in steps]
    assert seconds == sorted(seconds) and seconds[0] > 0 and seconds[-1] < recording.seconds


@pytest.mark.parametrize("options", ({"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}), ids=str)
def test_shared_blocks_are_those_of_the_allocator(model, options):
    cache, seen = make_cache(model), []

    def look(one: StepRecord) -> None:
        tables = cache.block_tables["full_attention"]
        held = [block for table in tables for block in table]
        seen.append(one.shared_blocks)
        assert one.shared_blocks == sum(held.count(block) > 1 for block in set(held))
        assert one.used_blocks == len(set(held)) == cache.stats().used_blocks
        assert [list(table) for table in one.block_tables["full_attention"].values()] == tables
        assert one.tokens == sum(cache.row_lengths)

    ids, mask = random_prompts(LENGTHS[:2])
    with record(cache, tables=True, on_step=look) as recording:
        generate(model, ids, mask, cache, max_new_tokens=8, **options)
    assert len(seen) == recording.num_steps == 8 and max(seen) > 0


def test_kept_prompts_count_as_free(model):
    cache = make_cache(model, prefix_cache=True)
    ids, mask = random_prompts([9])
    generate(model, ids, mask, cache, max_new_tokens=4)
    cache.reset()
    other, _ = random_prompts([6], seed=7)
    with record(cache) as recording:
        generate(model, other, None, cache, max_new_tokens=2)
    first = recording.steps[0]
    assert (first.used_blocks, first.kept_blocks, first.free_blocks, first.shared_blocks) == (2, 3, 62, 0)


def test_hybrid_models_sum_their_groups():
    model = enable_paged_attention(build_model("gemma2"))  # a window of 8, and full attention
    cache = make_cache(model)
    ids, mask = random_prompts([12])
    with record(cache, tables=True) as recording:
        generate(model, ids, mask, cache, max_new_tokens=8)
    last = recording.steps[-1]
    assert {name: len(rows["row 0"]) for name, rows in last.block_tables.items()} == {
        "sliding_attention(8)": 3,
        "full_attention": 5,
    }
    assert last.used_blocks == 8 and last.total_blocks == 128


# Whose steps ---------------------------------------------------------------------------------------------------------


def test_a_cache_has_its_own_steps_and_a_pool_those_of_all(model):
    pool = BlockPool(num_blocks=64, block_size=SIZE)
    one, other = (PagedCache(model.config, pool=pool) for _ in range(2))
    ids, mask = random_prompts([5])
    with record(one) as of_one, record(pool) as of_pool:
        generate(model, ids, mask, one, max_new_tokens=3)
        generate(model, ids, mask, other, max_new_tokens=4)
    assert (of_one.num_steps, of_pool.num_steps) == (3, 7)
    assert [step.used_blocks for step in of_pool.steps] == [2, 2, 2, 4, 4, 4, 4]
    assert pool.recordings == ()


def test_threads_on_one_pool_are_recorded_as_one_sequence_of_steps(model):
    pool = BlockPool(num_blocks=256, block_size=SIZE)
    ids, mask = random_prompts([5])
    with record(pool, tables=True) as recording:

        def run() -> None:
            generate(model, ids, mask, PagedCache(model.config, pool=pool), max_new_tokens=12)

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [one.number for one in recording.steps] == list(range(36))
    assert all(one.used_blocks + one.free_blocks == 256 for one in recording.steps)


# Exceptions ----------------------------------------------------------------------------------------------------------


def test_a_recording_may_end_while_a_step_of_another_thread_waits_for_the_lock(model):
    cache, ending = make_cache(model), []
    pool, lock = cache.pool, cache.pool.lock

    class EndsFirst:
        """What another thread does between a step's look at the recordings and its turn."""

        def __enter__(self):
            if ending:
                ending.pop().__exit__()
            lock.__enter__()

        def __exit__(self, *error):
            lock.__exit__()

        def take_if_free(self):
            return lock.take_if_free()

    class Told:
        def note_step(self, rows, step):
            ending.append(recording)

    ids, mask = random_prompts((5,))
    with record(pool) as recording:
        pool.lock, pool.recordings = EndsFirst(), (Told(), recording)
        generate(model, ids, mask, cache, max_new_tokens=1)
    pool.lock, pool.recordings = lock, ()
    assert recording.num_steps == 0 and recording.requests == [] and cache.row_lengths == [5]


@pytest.mark.parametrize("kind", ("llama", "mistral", "gemma2"))
def test_tokens_that_are_held_fill_the_blocks_but_for_the_last_of_each_table(kind):
    """Of all caches on the pool, in each group of layers, and without those that have left a window of 8."""
    model = enable_paged_attention(build_model(kind))
    pool = BlockPool(num_blocks=64, block_size=SIZE)
    with record(pool) as recording:
        caches = [PagedCache(model.config, pool=pool) for _ in range(2)]
        for cache, lengths in zip(caches, ((30,), (5, 13)), strict=True):
            ids, mask = random_prompts(lengths)
            generate(model, ids, mask, cache, max_new_tokens=6)
    for one in recording.steps:
        num_tables = len(pool.groups) * (1 if one.number < 6 else 3)
        assert 0 <= one.used_blocks * SIZE - one.held_tokens < num_tables * SIZE
    if kind == "llama":
        assert recording.steps[0].held_tokens == 30 and recording.steps[-1].held_tokens == 35 + 10 + 18


def test_a_step_that_fails_is_marked_and_the_recording_goes_on(model):
    cache = make_cache(model)
    ids, mask = random_prompts(LENGTHS)

    with record(cache) as recording:
        hook = model.model.layers[1].register_forward_pre_hook(
            lambda *_: 1 / 0 if cache.get_seq_length() == 13 else None
        )
        try:
            with pytest.raises(ZeroDivisionError):
                generate(model, ids, mask, cache, max_new_tokens=9)
        finally:
            hook.remove()
        held = cache.stats().used_blocks
        full = torch.cat((mask, torch.ones(3, 3, dtype=torch.long)), dim=1)
        forward(model, torch.ones(3, 1, dtype=torch.long), cache, attention_mask=full[:, :13])
    assert [one.undone for one in recording.steps] == [False, False, True, False]
    assert recording.num_undone == 1
    assert recording.steps[2].tokens == recording.steps[3].tokens == sum(LENGTHS) + 6
    assert recording.steps[1].used_blocks == held


def test_an_exception_within_leaves_a_readable_recording_and_a_pool_that_is_not_watched(model):
    cache = make_cache(model)
    ids, mask = random_prompts([5])
    with pytest.raises(ZeroDivisionError), record(cache) as recording:
        generate(model, ids, mask, cache, max_new_tokens=3)
        raise ZeroDivisionError
    assert not recording.is_running and len(recording.steps) == 3 and cache.pool.recordings == ()
    generate(model, ids, mask, make_cache(model), max_new_tokens=3)
    assert recording.num_steps == 3


@pytest.mark.parametrize("enabled", (True, False))
def test_a_callback_that_raises_fails_the_step_and_nothing_else(enabled):
    model = build_model("llama")
    if enabled:
        enable_paged_attention(model)
    cache = make_cache(model)
    ids, mask = random_prompts([6, 6])
    forward(model, ids, cache, attention_mask=mask)
    before = snapshot(cache)

    def refuse(one: StepRecord) -> None:
        raise PermissionError("no more")

    with record(cache, on_step=refuse) as recording, pytest.raises(PermissionError, match="no more"):
        forward(model, ids[:, :1], cache, attention_mask=torch.ones(2, 7, dtype=torch.long))
    assert_unchanged(cache, before)
    assert [one.undone for one in recording.steps] == [True]
    with record(cache, on_step=refuse), pytest.raises(PermissionError):
        cache.begin_step(2, 1, torch.ones(2, 7, dtype=torch.bool))  # by hand, where nobody sees the pass fail
    assert_unchanged(cache, before)


def test_a_step_that_finds_no_blocks_is_none(model):
    cache = make_cache(model, num_blocks=3)
    ids, mask = random_prompts([9])
    with record(cache) as recording, pytest.raises(OutOfBlocksError):
        generate(model, ids, mask, cache, max_new_tokens=9)
    assert recording.num_steps == 4 and recording.num_undone == 0  # 9 to 12 tokens
    check_books(cache)


def test_a_rollback_marks_its_step(model):
    cache = make_cache(model)
    ids, mask = random_prompts([5])
    with record(cache) as recording:
        forward(model, ids, cache, attention_mask=mask)
        cache.rollback()
    assert [one.undone for one in recording.steps] == [True]


# What it costs -------------------------------------------------------------------------------------------------------


def test_without_a_recording_a_step_looks_once(model):
    looks = []

    class Counting(BlockPool):
        @property
        def recordings(self):
            looks.append(1)
            return ()

        @recordings.setter
        def recordings(self, value):
            assert value == ()

    cache = PagedCache(model.config, pool=Counting(num_blocks=64, block_size=SIZE))
    ids, mask = random_prompts(LENGTHS)
    forward(model, ids, cache, attention_mask=mask)
    looks.clear()
    cache.enter_pass()
    cache.begin_step(3, 1, torch.cat((mask, torch.ones(3, 1, dtype=torch.long)), dim=1).bool())
    assert len(looks) == 1
    cache.leave_pass(failed=True)


def test_memory_is_bounded_and_the_last_and_the_fullest_step_are_never_dropped(model):
    cache, told = make_cache(model), []
    ids, mask = random_prompts([5])
    with record(cache, limit=8, on_step=lambda one: told.append(one.number)) as recording:
        generate(model, ids, mask, cache, max_new_tokens=60)
        cache.reset()
        generate(model, ids, mask, cache, max_new_tokens=41)
    assert told == list(range(101)) and recording.num_steps == 101
    numbers = [one.number for one in recording.steps]
    assert len(numbers) <= 10 and numbers == sorted(set(numbers))
    assert numbers[0] == 0 and numbers[-1] == 100
    assert recording.peak.used_blocks == 16 and recording.peak in recording.steps
    apart = {b - a for a, b in itertools.pairwise(numbers) if recording.peak.number not in (a, b)}
    assert len(apart - {100 % 16}) == 1  # evenly thinned, but for the last


def test_tables_that_did_not_change_are_one_object(model):
    cache = make_cache(model)
    ids, mask = random_prompts([5])
    with record(cache, tables=True) as recording:
        generate(model, ids, mask, cache, max_new_tokens=4)
    first, second = (one.block_tables["full_attention"]["row 0"] for one in recording.steps[:2])
    assert first is second


def test_tables_of_caches_that_take_turns_are_one_object_while_they_do_not_change(model):
    pool = BlockPool(num_blocks=64, block_size=SIZE)
    caches = [PagedCache(model.config, pool=pool) for _ in range(2)]
    with record(pool, tables=True) as recording, torch.no_grad():
        for _ in range(2):
            for cache in caches:
                forward(model, torch.ones((1, 1), dtype=torch.long), cache)
    tables = [one.block_tables["full_attention"]["row 0"] for one in recording.steps]
    assert tables[0] is tables[2] and tables[1] is tables[3] and tables[0] != tables[1]


def test_a_recording_that_has_ended_keeps_nothing_alive(model):
    cache = make_cache(model)
    ids, mask = random_prompts([5])
    with record(cache) as recording:
        generate(model, ids, mask, cache, max_new_tokens=3)
    watched = weakref.ref(cache), weakref.ref(cache.pool)
    del cache
    gc.collect()
    assert [one() for one in watched] == [None, None] and len(recording.steps) == 3


# Batches -------------------------------------------------------------------------------------------------------------


def run_batch(batcher, lengths, **options):
    handles = [batcher.submit(prompt, **({"max_new_tokens": 14} | options)) for prompt in prompts(*lengths)]
    batcher.run()
    return handles


def test_the_states_of_requests_follow_one_another_and_agree_with_the_results(model):
    with ContinuousBatcher(
        model, num_blocks=20, block_size=SIZE, max_step_tokens=8, max_rows=5, prefix_cache=False
    ) as batcher:
        with record(batcher) as recording:
            handles = run_batch(batcher, (3, 33, 1, 17, 9, 40, 12))
        stats = batcher.stats()
    assert recording.num_steps == stats.steps and stats.preemptions > 0
    requests = recording.requests
    assert [one.label for one in requests] == [f"request {index}" for index in range(7)]
    for one, handle in zip(requests, handles, strict=True):
        result = handle.result()
        states = [span.state for span in one.spans]
        assert states[:2] == ["waiting", "prompt"] and states[-1] == "decoding"
        assert states.count("preempted") == result.preemptions and states.count("waiting") == 1
        for before, after in itertools.pairwise(one.spans):
            assert before.end == after.start and before.end_step == after.first_step
            assert before.state != after.state and before.start <= before.end
        assert one.finish_reason == "length" and one.end == one.spans[-1].end
        assert one.prompt_tokens == len(handle.prompt_ids)
        assert one.end - one.spans[0].start == pytest.approx(result.seconds, abs=0.05)
    # The steps that a request was fed in are those that its spans say: the first new token comes with the prompt.
    long = requests[5]
    fed = [span.end_step - span.first_step for span in long.spans if span.state in ("prompt", "decoding")]
    assert sum(fed) >= -(-40 // 8) + 13
    for one in recording.steps:
        assert one.used_blocks + one.free_blocks == 20 and one.rows <= one.running <= 5
        assert one.running + one.waiting <= 7


def test_the_blocks_of_a_batch_are_the_allocators(model):
    with ContinuousBatcher(model, num_blocks=40, block_size=SIZE, max_step_tokens=16) as batcher:
        allocator = batcher.pool.allocators[0]

        def look(one: StepRecord) -> None:
            held = {block for table in one.block_tables["full_attention"].values() for block in table}
            assert one.used_blocks == allocator.num_used == len(held)
            assert one.tokens == sum(sequence.num_stored for sequence in batcher.running)
            assert one.kept_blocks == allocator.num_idle and one.shared_blocks == allocator.num_shared

        with record(batcher, tables=True, on_step=look) as recording:
            run_batch(batcher, (9, 20, 5), num_return_sequences=2, do_sample=True, seed=1)
        assert max(one.shared_blocks for one in recording.steps) > 0
        assert max(one.kept_blocks for one in recording.steps) > 0
        assert [one.label for one in recording.requests][:3] == ["request 0", "request 0.1", "request 1"]
        assert all(one.finish_reason == "length" for one in recording.requests)
        assert (
            sum(one.new_tokens for one in recording.steps) == sum((9, 20, 5)) + 6 * 13
        )  # prompts once; the last new tokens are never fed


def test_cancelled_failed_and_open_requests(model):
    class Fails(LogitsProcessor):
        def __call__(self, input_ids, scores):
            raise ValueError("never")

    first, second, third, fourth = prompts(5, 6, 7, 8)
    with ContinuousBatcher(model, num_blocks=64, block_size=SIZE, max_rows=2) as batcher:
        with record(batcher) as recording:
            running = batcher.submit(first, max_new_tokens=30)
            batcher.submit(second, max_new_tokens=3, logits_processor=[Fails()])
            batcher.step()
            cancelled = batcher.submit(third, max_new_tokens=30)
            cancelled.cancel()
            batcher.step()
            running.cancel()
            batcher.submit(fourth, max_new_tokens=30)
            assert [one.spans[-1].state for one in recording.requests][3] == "waiting"  # and can be read meanwhile
        assert [one.finish_reason for one in recording.requests] == ["cancelled", "error", "cancelled", None]
        assert [[span.state for span in one.spans] for one in recording.requests] == [
            ["waiting", "prompt", "decoding"],
            ["waiting", "prompt"],
            ["waiting"],
            ["waiting"],
        ]
        assert recording.requests[3].end is None


def test_a_recording_that_begins_late_says_only_what_it_saw(model):
    with ContinuousBatcher(model, num_blocks=64, block_size=SIZE) as batcher:
        batcher.submit(prompts(5)[0], max_new_tokens=9)
        batcher.step()
        batcher.step()
        with record(batcher.pool) as of_pool, record(batcher) as recording:
            batcher.run()
        assert [span.state for span in recording.requests[0].spans] == ["decoding"]
        assert recording.num_steps == of_pool.num_steps == 7
        assert of_pool.requests[0].finish_reason == "length"


def test_a_batch_step_that_fails_is_marked(model):
    with ContinuousBatcher(model, num_blocks=64, block_size=SIZE) as batcher, record(batcher) as recording:
        handle = batcher.submit(prompts(5)[0], max_new_tokens=3)
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        try:
            with pytest.raises(ZeroDivisionError):
                batcher.step()
        finally:
            hook.remove()
        batcher.run()
        assert [one.undone for one in recording.steps] == [True, False, False, False]
        assert handle.result().finish_reason == "length"


def test_requests_are_bounded_too(model):
    with ContinuousBatcher(model, num_blocks=64, block_size=SIZE) as batcher, record(batcher, limit=3) as recording:
        for _ in range(4):
            run_batch(batcher, (4, 5), max_new_tokens=2)
        assert [one.index for one in recording.requests] == [5, 6, 7]
        assert recording.num_dropped_requests == 5


# What comes of it ----------------------------------------------------------------------------------------------------


def test_steps_and_the_end_are_logged(model, caplog):
    cache = make_cache(model)
    ids, mask = random_prompts([5])
    with caplog.at_level(logging.DEBUG, "hf_paged.steps"), record(cache) as recording:
        generate(model, ids, mask, cache, max_new_tokens=2)
    messages = [(entry.levelname, entry.getMessage()) for entry in caplog.records if entry.name == "hf_paged.steps"]
    assert messages[0] == (
        "DEBUG",
        "step 0: 1 rows, 5 new tokens, 5 stored; of 64 blocks 2 used (0 shared), 62 free (0 kept)",
    )
    assert messages[-1] == ("INFO", repr(recording)) and len(messages) == 3
    assert "steps=2, peak=2 of 64 blocks" in repr(recording)


def test_a_recording_is_json(model):
    with ContinuousBatcher(model, num_blocks=64, block_size=SIZE) as batcher, record(batcher, tables=True) as recording:
        run_batch(batcher, (4, 5), max_new_tokens=2)
    known = json.loads(json.dumps(recording.as_dict()))
    assert known["num_steps"] == 2 and known["steps"][0]["new_tokens"] == 9
    assert known["requests"][1]["spans"][0]["state"] == "waiting"


def test_misuse_is_refused(model):
    with pytest.raises(TypeError, match="PagedCache, a BlockPool or a ContinuousBatcher, not LlamaForCausalLM"):
        record(model)
    for limit in (1, True, 2.5):
        with pytest.raises(ValueError, match="limit must be an integer of at least 2"):
            record(make_cache(model), limit=limit)
    recording = record(make_cache(model))
    assert recording.seconds == 0 and recording.steps == [] and recording.peak is None
    with recording:
        pass
    with pytest.raises(RuntimeError, match="begun already"), recording:
        pass
