"""Continuous batching with many threads, slow readers, cancelled requests, exceptions and interrupts."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
import weakref
from functools import partial

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

from hf_paged import (
    IMPLEMENTATION,
    BlockPool,
    ContinuousBatcher,
    QueueFullError,
    Request,
    disable_paged_attention,
    enable_paged_attention,
    generate_many,
    iterate_many,
    paged_attention,
)
from hf_paged.patches.enable import is_enabled
from hf_paged.sweep.tiny import build
from tests.batching_checks import alone, assert_all_free, assert_alone, prompts
from tests.helpers import build_model, generate, tiny_model


def test_cancelling_frees_the_blocks_at_once():
    model = tiny_model("llama")
    with ContinuousBatcher(model, num_blocks=64, block_size=4, prefix_cache=False) as batcher:
        waiting = batcher.submit([1, 2, 3], max_new_tokens=100)
        waiting.cancel()
        assert waiting.result().finish_reason == "cancelled" and waiting.result().tokens == []
        running, other = (batcher.submit(p, max_new_tokens=40) for p in prompts(20, 8))
        for _ in range(3):
            batcher.step()
        used = batcher.stats().used_blocks
        running.cancel()
        assert batcher.stats().used_blocks == used - 6
        assert running.result().tokens == alone(model, running.prompt_ids, max_new_tokens=3)
        running.cancel()
        assert_alone(model, other, max_new_tokens=40)
        assert batcher.stats().cancelled == 2
        assert_all_free(batcher)


def test_cancelling_a_request_cancels_all_its_samples():
    with ContinuousBatcher(tiny_model("llama"), num_blocks=64, block_size=4) as batcher:
        first = batcher.submit([1, 2, 3], do_sample=True, num_return_sequences=3, max_new_tokens=50)
        never = batcher.submit([1, 2, 3], do_sample=True, num_return_sequences=3, max_new_tokens=50)
        never.samples[1].cancel()
        for _ in range(3):
            batcher.step()
        first.cancel()
        assert batcher.is_idle
        assert [len(handle.result().tokens) for handle in (*first.samples, *never.samples)] == [3, 3, 3, 0, 0, 0]
        assert_all_free(batcher)


@pytest.mark.parametrize("where", ("processor", "criterion", "streamer"))
def test_an_exception_ends_its_request_alone(where):
    model = tiny_model("llama")

    calls = 0

    def fail_at_the_third() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ZeroDivisionError("mine")

    class Processor(LogitsProcessor):
        def __call__(self, input_ids, scores):
            fail_at_the_third()
            return scores

    class Criterion(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            fail_at_the_third()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    class Streams(Streamer):
        def put(self, value):
            fail_at_the_third()

    option = {
        "processor": {"logits_processor": [Processor()]},
        "criterion": {"stopping_criteria": [Criterion()]},
        "streamer": {"streamer": Streams()},
    }[where]
    with ContinuousBatcher(model, num_blocks=64) as batcher:
        before, after = (prompts(5, 9)[i] for i in (0, 1))
        first = batcher.submit(before, max_new_tokens=12)
        faulty = batcher.submit([1, 2, 3], max_new_tokens=200, **option)
        last = batcher.submit(after, max_new_tokens=12)
        with pytest.raises(ZeroDivisionError, match="mine"):
            faulty.result()
        for handle in (first, last):
            assert_alone(model, handle, max_new_tokens=12)
        assert faulty.outcome().finish_reason == "error" and len(faulty.tokens) < 200
        assert batcher.stats().failed == 1
        batcher.run()
        assert_all_free(batcher)


def test_an_interrupt_undoes_the_step_and_the_batch_can_go_on():
    model = build_model("llama")
    with ContinuousBatcher(model, num_blocks=64) as batcher:
        handles = [batcher.submit(p, max_new_tokens=12) for p in prompts(5, 19)]
        calls = 0

        def interrupt(module, args):
            nonlocal calls
            calls += 1
            if calls == 4:
                raise KeyboardInterrupt

        hook = model.model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            batcher.run()
        hook.remove()
        batcher.run()
        for handle in handles:
            assert_alone(model, handle, max_new_tokens=12)


@pytest.mark.parametrize("where", ("model", "processor"))
def test_after_an_interrupt_model_and_pool_are_as_before(where):
    model = build_model("llama")
    before = model.config._attn_implementation
    pool = BlockPool(num_blocks=64)

    def stop(*args):
        raise KeyboardInterrupt

    class Stop(LogitsProcessor):
        __call__ = staticmethod(stop)

    with pytest.raises(KeyboardInterrupt), ContinuousBatcher(model, pool=pool) as batcher:
        options = {"logits_processor": [Stop()]} if where == "processor" else {}
        batcher.submit([1, 2, 3], max_new_tokens=5, do_sample=True)
        batcher.submit([4, 5, 6, 7], max_new_tokens=5, **options)
        hook = model.model.layers[1].register_forward_pre_hook(stop if where == "model" else lambda *args: None)
        batcher.run()
    hook.remove()
    assert all(allocator.num_free == allocator.num_blocks for allocator in pool.allocators)
    assert model.config._attn_implementation == before
    generate(model, torch.tensor([[1, 2, 3]]))


def test_a_batcher_leaves_a_model_enabled_that_was():
    model = build_model("llama")
    with paged_attention(model):
        with ContinuousBatcher(model, num_blocks=16) as batcher:
            batcher.submit([1, 2], max_new_tokens=2)
        assert model.config._attn_implementation == IMPLEMENTATION
        with pytest.raises(RuntimeError, match="closed"):
            batcher.submit([1, 2])
    assert model.config._attn_implementation != IMPLEMENTATION


def test_tokens_are_read_as_they_come():
    model = tiny_model("llama")
    with ContinuousBatcher(model, num_blocks=64) as batcher:
        one, other = batcher.submit([1, 2, 3], max_new_tokens=8), batcher.submit([4, 5], max_new_tokens=8)
        seen = []
        for token in one:
            seen.append(token)
            assert len(other.tokens) <= len(seen)  # no further than what was asked for
        assert seen == one.result().tokens == alone(model, [1, 2, 3], max_new_tokens=8)
        assert list(other) == alone(model, [4, 5], max_new_tokens=8)
        assert list(one) == seen  # again


class Streamer:
    def __init__(self, delay: float = 0.0) -> None:
        self.got, self.ended, self.delay = [], False, delay

    def put(self, value) -> None:
        time.sleep(self.delay)
        self.got.append(value.tolist())

    def end(self) -> None:
        self.ended = True


def test_streamers_get_what_generate_gives_them():
    model = tiny_model("llama")
    expected, streamer = Streamer(), Streamer()
    generate(model, torch.tensor([[1, 2, 3]]), max_new_tokens=6, streamer=expected)
    with ContinuousBatcher(model, num_blocks=64) as batcher:
        batcher.submit([1, 2, 3], max_new_tokens=6, streamer=streamer).result()
    assert streamer.got == expected.got and streamer.ended


def test_a_slow_consumer_stops_nobody():
    model = tiny_model("llama")
    slow = Streamer(delay=0.05)
    with ContinuousBatcher(model, num_blocks=64) as batcher:
        one = batcher.submit([1, 2, 3], max_new_tokens=12, streamer=slow)
        other = batcher.submit([4, 5], max_new_tokens=12)
        other.result()
        assert len(slow.got) < 12 and not one.done
        assert batcher.stats().running == 0
        assert one.outcome().tokens == list(one), "all tokens are known, also while the streamer is given them"
        one.result()
        assert slow.ended and sum(map(len, slow.got[1:])) == 12


def test_requests_from_many_threads():
    """Whoever waits runs the batch, one thread at a time."""
    model = tiny_model("llama")
    errors, results = [], {}
    with ContinuousBatcher(model, num_blocks=40, block_size=4, max_step_tokens=24, max_waiting=3) as batcher:

        def work(number: int) -> None:
            try:
                dice = random.Random(number)
                for turn in range(3):
                    [prompt] = prompts(dice.randint(1, 30), seed=10 * number + turn)
                    handle = batcher.submit(prompt, max_new_tokens=dice.randint(1, 10))
                    if dice.random() < 0.2:
                        handle.cancel()
                    elif dice.random() < 0.5:
                        results[number, turn] = prompt, list(handle)
                    else:
                        results[number, turn] = prompt, handle.result(timeout=60).tokens
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        batcher.run()
        assert not errors
        assert_all_free(batcher)
    for prompt, tokens in results.values():
        assert tokens == alone(model, prompt, max_new_tokens=len(tokens))


class Calls(LogitsProcessor):
    """Calls back at each token."""

    def __init__(self, back) -> None:
        self.back = back

    def __call__(self, input_ids, scores):
        self.back()
        return scores


def in_a_thread(call) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_a_cancel_is_not_lost_while_another_thread_takes_requests_in():
    model, ends = tiny_model("llama"), threading.Event()
    with ContinuousBatcher(model, num_blocks=64) as batcher:

        def run() -> None:
            while not ends.is_set():
                batcher.step()

        runs = in_a_thread(run)
        try:
            for _ in range(300):
                handle = batcher.submit([1, 2, 3], max_new_tokens=60)
                handle.cancel()
                assert handle.result().finish_reason == "cancelled"
        finally:
            ends.set()
            runs.join()


def test_a_cancel_during_the_last_step_that_anybody_runs():
    model, in_step, may_end = tiny_model("llama"), threading.Event(), threading.Event()

    def wait() -> None:
        in_step.set()
        may_end.wait(10)

    with ContinuousBatcher(model, num_blocks=64, prefix_cache=False) as batcher:
        handle = batcher.submit([1, 2, 3], max_new_tokens=9, logits_processor=[Calls(wait)])
        runs = in_a_thread(batcher.step)
        in_step.wait(10)
        handle.cancel()
        may_end.set()
        runs.join()
        assert handle.done and batcher.stats().used_blocks == 0


def test_a_batch_is_idle_only_when_every_handle_has_ended():
    with ContinuousBatcher(tiny_model("llama"), num_blocks=64) as batcher:
        seen, remove = [], batcher._scheduler.remove

        def watched(sequence, **options) -> None:
            remove(sequence, **options)
            seen.append((batcher.is_idle, sequence.handle.done))

        batcher._scheduler.remove = watched
        batcher.submit([1, 2, 3], max_new_tokens=2)
        batcher.run()
        assert seen == [(False, False)]


def test_closing_does_not_wait_for_those_who_wait():
    model = tiny_model("llama")
    for _ in range(5):
        batcher = ContinuousBatcher(model, num_blocks=640)
        handles = [batcher.submit([1, 2, 3], max_new_tokens=900) for _ in range(4)]
        threads = [in_a_thread(handle.result) for handle in handles]
        while batcher.stats().steps < 3:
            time.sleep(0.001)
        steps = batcher.stats().steps
        batcher.close()
        assert batcher.stats().steps <= steps + 5
        for handle, thread in zip(handles, threads, strict=True):
            thread.join()
            assert handle.result().finish_reason == "cancelled"
        assert_all_free(batcher)


def test_what_a_step_calls_cannot_close():
    with ContinuousBatcher(tiny_model("llama"), num_blocks=64) as batcher:
        closes = batcher.submit([1, 2, 3], max_new_tokens=4, logits_processor=[Calls(batcher.close)])
        with pytest.raises(RuntimeError, match="cannot close"):
            closes.result()
        assert batcher.submit([1, 2, 3], max_new_tokens=2).result().tokens


def test_a_streamer_that_fails_as_its_request_ends():
    class Streams(Streamer):
        def put(self, value):
            fails.wait(10)
            raise ZeroDivisionError("mine")

    def last_step() -> None:
        fails.set()
        while not batcher._early:  # until the streamer has asked for the end
            time.sleep(0.001)

    fails = threading.Event()
    with ContinuousBatcher(tiny_model("llama"), num_blocks=64) as batcher:
        handle = batcher.submit([1, 2], max_new_tokens=1, streamer=Streams(), logits_processor=[Calls(last_step)])
        with pytest.raises(ZeroDivisionError):
            handle.result()


def test_no_more_requests_wait_than_may():
    with ContinuousBatcher(tiny_model("llama"), num_blocks=64, max_waiting=2) as batcher:

        def submit() -> None:
            start.wait()
            try:
                made.append(batcher.submit([1, 2, 3], max_new_tokens=1, block=False))
            except QueueFullError:
                refused.append(1)

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for _ in range(20):
                made, refused, start = [], [], threading.Barrier(6)
                for thread in [in_a_thread(submit) for _ in range(6)]:
                    thread.join()
                assert (len(made), len(refused)) == (2, 4)
                batcher.run()
        finally:
            sys.setswitchinterval(interval)


def test_several_batchers_on_one_model():
    """The last to close leaves the model as the first has found it."""
    model = build_model("llama")
    before = model.config._attn_implementation
    first, second = (ContinuousBatcher(model, num_blocks=64) for _ in range(2))
    handle = second.submit([1, 2, 3], max_new_tokens=5)
    first.close()
    first.close()
    tokens = handle.result().tokens
    second.close()
    assert model.config._attn_implementation == before
    assert tokens == alone(model, [1, 2, 3], max_new_tokens=5)


def test_generate_many_from_several_threads():
    model, asked, results = build_model("llama"), prompts(5, 17, 9), {}

    def work(number: int) -> None:
        results[number] = generate_many(model, asked, max_new_tokens=4 + 6 * number, num_blocks=64)

    for thread in [in_a_thread(partial(work, number)) for number in range(3)]:
        thread.join()
    for number, some in results.items():
        assert [result.tokens for result in some] == [alone(model, p, max_new_tokens=4 + 6 * number) for p in asked]
    assert len(results) == 3 and model.config._attn_implementation != IMPLEMENTATION


def test_scores_that_are_no_numbers_fail_their_request_alone():
    model = build_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("nan")
    with ContinuousBatcher(model, num_blocks=64, prefix_cache=False) as batcher:
        handles = [
            batcher.submit(prompt, do_sample=True, seed=number, max_new_tokens=6)
            for number, prompt in enumerate([[1, 2], [7], [3, 4, 5]])
        ]
        with pytest.raises(RuntimeError, match="nan"):
            handles[1].result()
        for number in (0, 2):
            torch.manual_seed(number)
            expected = alone(model, handles[number].prompt_ids, do_sample=True, max_new_tokens=6)
            assert handles[number].result().tokens == expected


def test_a_full_queue():
    model = tiny_model("llama")
    with ContinuousBatcher(model, num_blocks=64, max_rows=1, max_waiting=2) as batcher:
        for _ in range(2):
            batcher.submit([1, 2, 3], max_new_tokens=30)
        with pytest.raises(QueueFullError, match="max_waiting=2"):
            batcher.submit([1, 2, 3], max_new_tokens=3, block=False)
        with pytest.raises(QueueFullError):
            batcher.submit([1, 2, 3], max_new_tokens=3, timeout=0.0)
        assert batcher.submit([1, 2, 3], max_new_tokens=3).result().tokens  # waits by running the others


def test_a_queue_never_holds_more_than_it_may():
    with ContinuousBatcher(tiny_model("llama"), num_blocks=64, max_rows=1, max_waiting=2) as batcher:
        seen = []

        def work() -> None:
            for _ in range(4):
                batcher.submit([1, 2, 3], max_new_tokens=2)
                seen.append(batcher.stats().waiting)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        batcher.run()
        assert len(seen) == 24 and max(seen) <= 2 and batcher.stats().finished == 24


def test_a_result_that_takes_too_long():
    with ContinuousBatcher(tiny_model("llama"), num_blocks=64) as batcher:
        handle = batcher.submit([1, 2, 3], max_new_tokens=300)
        with pytest.raises(TimeoutError):
            handle.result(timeout=0.01)
        assert len(handle.result().tokens) == 300


def test_what_a_step_calls_cannot_run_another():
    model = tiny_model("llama")
    with ContinuousBatcher(model, num_blocks=64) as batcher:

        class Waits(LogitsProcessor):
            def __call__(self, input_ids, scores):
                other.result()

        class Cancels(LogitsProcessor):
            def __call__(self, input_ids, scores):
                other.cancel()
                return scores

        other = batcher.submit([1, 2, 3], max_new_tokens=8)
        waits = batcher.submit([1, 2, 3], max_new_tokens=4, logits_processor=[Waits()])
        with pytest.raises(RuntimeError, match="a step is running"):
            waits.result()
        cancels = batcher.submit([1, 2, 3], max_new_tokens=4, logits_processor=[Cancels()])
        assert len(cancels.result().tokens) == 4
        assert other.result().finish_reason == "cancelled"


def test_priorities():
    model = tiny_model("llama")
    with ContinuousBatcher(model, num_blocks=64, max_rows=1) as batcher:
        low, high = batcher.submit([1, 2], max_new_tokens=4), batcher.submit([3, 4], max_new_tokens=4, priority=1)
        high.result()
        assert not low.tokens
        low.result()


def test_a_batcher_that_nobody_closes_leaves_the_model_as_it_was():
    model = build_model("llama")
    before = model.config._attn_implementation
    batcher = ContinuousBatcher(model, num_blocks=16)
    batcher.submit([1, 2], max_new_tokens=2).result()
    del batcher
    gc.collect()
    assert model.config._attn_implementation == before
    events = iterate_many(model, [[1, 2]], max_new_tokens=3, num_blocks=16)
    assert model.config._attn_implementation == IMPLEMENTATION
    del events
    gc.collect()
    assert model.config._attn_implementation == before


def test_what_the_user_wants_of_a_model_outlives_a_batcher():
    model = build_model("llama")
    first, second = (ContinuousBatcher(model, num_blocks=16) for _ in range(2))
    with paged_attention(model):
        first.close()
    assert is_enabled(model), "the second is open still"
    second.close()
    assert not is_enabled(model)
    with ContinuousBatcher(model, num_blocks=16):
        enable_paged_attention(model)
    assert is_enabled(model)
    with ContinuousBatcher(model, num_blocks=16):
        disable_paged_attention(model)
        enable_paged_attention(model)
    assert is_enabled(model)
    with ContinuousBatcher(model, num_blocks=16):
        disable_paged_attention(model)
    assert not is_enabled(model)
    with paged_attention(model):
        batcher = ContinuousBatcher(model, num_blocks=16)
    assert batcher.submit([1, 2], max_new_tokens=2).result().tokens
    batcher.close()
    assert not is_enabled(model)


def test_a_batcher_may_be_collected_while_another_is_made(monkeypatch):
    """The garbage collector runs when it likes, also while a model is being enabled."""
    old, new = build_model("llama"), build_model("llama")
    before, forgotten, enable = old.config._attn_implementation, [ContinuousBatcher(old, num_blocks=16)], []

    def collect(model):
        forgotten.clear()
        gc.collect()
        enable.append(model)
        return enable_paged_attention(model)

    monkeypatch.setattr("hf_paged.patches.enable.enable_paged_attention", collect)
    thread = threading.Thread(target=lambda: ContinuousBatcher(new, num_blocks=16).close(), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and enable == [new]
    assert old.config._attn_implementation == new.config._attn_implementation == before


def test_an_error_in_a_result_does_not_keep_the_pool():
    def fail() -> None:
        raise ZeroDivisionError

    pool = BlockPool(num_blocks=8)
    asked = [[1, 2], Request([1, 2], logits_processor=[Calls(fail)]), Request([1, 2], max_new_tokens=999)]
    results = generate_many(tiny_model("llama"), asked, pool=pool, max_new_tokens=3, raise_errors=False)
    held = weakref.ref(pool)
    del pool
    gc.collect()
    assert [result.finish_reason for result in results] == ["length", "error", "error"]
    assert held() is None
    assert "in fail\n" in results[1].error.__notes__[0]


def test_batches_of_a_model_that_counts_positions_in_several_threads():
    """Positions of one batch's step are told to no other's."""
    model = build("bart", "BartForCausalLM", "CAUSAL_LM")
    asked, results = prompts(7, 4), {}
    expected = [alone(model, prompt, max_new_tokens=20) for prompt in asked]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:

        def work(number: int) -> None:
            with ContinuousBatcher(model, num_blocks=16) as batcher:
                results[number] = [batcher.submit(asked[number], max_new_tokens=20).result().tokens for _ in range(4)]

        for thread in [in_a_thread(partial(work, number)) for number in range(2)]:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert results == {number: [tokens] * 4 for number, tokens in enumerate(expected)}
