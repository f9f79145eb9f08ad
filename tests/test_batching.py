"""Continuous batching: every request's tokens are those of its own generate() call, whatever else is in the batch."""

from __future__ import annotations

import copy
import gc
import random
import sys
import threading
import time
import weakref
from functools import partial

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    MaxLengthCriteria,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
)

from hf_paged import (
    IMPLEMENTATION,
    BlockPool,
    ContinuousBatcher,
    PagedCache,
    QueueFullError,
    Request,
    RequestTooLongError,
    enable_paged_attention,
    generate_many,
    iterate_many,
    pack_linears,
    paged_attention,
    use_backend,
)
from hf_paged.batching import enabler, runner
from hf_paged.models import cache_keyword
from hf_paged.sweep.tiny import build
from tests.helpers import PAD, VOCAB, build_model, generate, same_tokens, tiny_model

FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss", "gpt2", "qwen3", "bloom", "falcon", "mpt", "gpt_neo")


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def alone(model, prompt: list[int], **options) -> list[int]:
    """What generate() with transformers' own cache gives, without the prompt."""
    return generate(model, torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def assert_alone(model, handle, **options) -> None:
    actual = torch.tensor(handle.prompt_ids + handle.result().tokens)
    same_tokens(model, actual, torch.tensor(handle.prompt_ids + alone(model, handle.prompt_ids, **options)))


def assert_all_free(batcher: ContinuousBatcher) -> None:
    for group, allocator in enumerate(batcher.pool.allocators):
        allocator.check([] if batcher.pool.prefixes is None else batcher.pool.prefixes.tables[group])
        assert allocator.num_free == allocator.num_blocks


@pytest.mark.smoke
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("step_tokens", (5, 64))
def test_ragged_prompts_in_a_tiny_pool(family, step_tokens):
    """Prompts in parts or whole, rows that come and go, preemptions."""
    model = tiny_model(family)
    with ContinuousBatcher(model, num_blocks=20, block_size=4, max_step_tokens=step_tokens, max_rows=5) as batcher:
        handles = [batcher.submit(p, max_new_tokens=14) for p in prompts(3, 33, 1, 17, 9, 40, 12)]
        batcher.run()
        for handle in handles:
            assert_alone(model, handle, max_new_tokens=14)
        assert batcher.stats().finished == 7
        if family != "mistral":  # whose blocks are freed behind its window
            assert batcher.stats().preemptions
        assert_all_free(batcher)


@pytest.mark.parametrize("backend", ("cpu", "reference"))
def test_windows_are_exact_across_parts_of_a_prompt(backend):
    model = tiny_model("mistral")  # a window of 8
    for step_tokens in (3, 8, 11):
        with (
            use_backend(backend),
            ContinuousBatcher(model, num_blocks=64, block_size=4, max_step_tokens=step_tokens) as b,
        ):
            handles = [b.submit(p, max_new_tokens=20) for p in prompts(7, 8, 9, 30)]
            b.run()
            for handle in handles:
                assert_alone(model, handle, max_new_tokens=20)
            assert b.stats().peak_blocks <= 4 * (-(-(8 + step_tokens) // 4) + 2)


SAMPLING = (
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8, "temperature": 1.3},
    {"min_p": 0.05, "top_k": 0},
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 2, "top_k": 20},
)


@pytest.mark.parametrize("prefix_cache", (True, False))
def test_samples_are_those_of_generate_with_the_same_seed(prefix_cache):
    """Also of requests that were preempted, under penalties that look at all tokens before."""
    model = tiny_model("llama")
    with ContinuousBatcher(
        model, num_blocks=24, block_size=4, max_step_tokens=16, prefix_cache=prefix_cache
    ) as batcher:
        handles = []
        for number, (prompt, options) in enumerate(zip(prompts(3, 20, 9, 14, 5, 30), SAMPLING, strict=True)):
            handles.append(batcher.submit(prompt, max_new_tokens=24, do_sample=True, seed=number, **options))
        batcher.run()
        assert batcher.stats().preemptions
        for number, (handle, options) in enumerate(zip(handles, SAMPLING, strict=True)):
            torch.manual_seed(number)
            expected = alone(model, handle.prompt_ids, max_new_tokens=24, do_sample=True, **options)
            assert handle.result().tokens == expected, options


def test_equal_settings_are_sampled_together_and_still_apart():
    model = tiny_model("llama")
    with ContinuousBatcher(model, num_blocks=64) as batcher:
        options = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.9, "top_k": 30}
        handles = [batcher.submit(p, seed=i, **options) for i, p in enumerate(prompts(5, 5, 9, 2))]
        batcher.run()
        for seed, handle in enumerate(handles):
            torch.manual_seed(seed)
            assert handle.result().tokens == alone(model, handle.prompt_ids, **options)


def test_without_a_seed_torchs_decides():
    model = tiny_model("llama")

    def run() -> list[int]:
        torch.manual_seed(5)
        with ContinuousBatcher(model, num_blocks=64) as batcher:
            return batcher.submit([1, 2, 3], do_sample=True, max_new_tokens=12).result().tokens

    assert run() == run()


def test_samples_of_a_prompt_share_its_blocks():
    model = tiny_model("llama")
    [prompt] = prompts(42)
    with ContinuousBatcher(model, num_blocks=64, block_size=4) as batcher:
        first = batcher.submit(prompt, num_return_sequences=5, do_sample=True, seed=3, max_new_tokens=6)
        batcher.step()
        assert batcher.stats().used_blocks == 11
        batcher.step()
        assert batcher.stats().used_blocks == 10 + 5
        assert batcher.stats().prompt_tokens == 42
        for number, handle in enumerate(first.samples):
            torch.manual_seed(3 + number)
            assert handle.result().tokens == alone(model, prompt, do_sample=True, max_new_tokens=6)
            assert handle.sample == number and handle.index == first.index
        assert batcher.stats().prompt_tokens == 42
        assert_all_free(batcher)


def test_prompts_that_begin_alike_are_computed_once():
    model = tiny_model("llama")
    [shared] = prompts(32)
    with ContinuousBatcher(model, num_blocks=64, block_size=4, max_step_tokens=16) as batcher:
        handles = [batcher.submit([*shared, *tail], max_new_tokens=8) for tail in prompts(3, 5, 2, seed=1)]
        batcher.run()
        assert [handle.result().cached_tokens for handle in handles] == [0, 32, 32]
        assert batcher.stats().prompt_tokens == 32 + 3 + 5 + 2 and batcher.stats().cached_tokens == 64
        for handle in handles:
            assert_alone(model, handle, max_new_tokens=8)
        later = batcher.submit([*handles[0].prompt_ids, *handles[0].tokens, 7], max_new_tokens=8)
        assert later.result().cached_tokens == 40  # the answer was kept, too
        assert_alone(model, later, max_new_tokens=8)


def test_prompts_are_shared_with_generate_on_the_same_pool():
    model = build_model("llama")
    enable_paged_attention(model)
    pool = BlockPool(num_blocks=64, block_size=4, prefix_cache=True)
    [prompt] = prompts(33)
    generate(model, torch.tensor([prompt]), cache=PagedCache(model.config, pool=pool))
    with ContinuousBatcher(model, pool=pool) as batcher:
        assert batcher.submit(prompt, max_new_tokens=4).result().cached_tokens == 32
    with ContinuousBatcher(model, pool=pool) as batcher:
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
        handle = batcher.submit(prompt, max_new_tokens=4)
        assert handle.result().cached_tokens == 0  # of other weights
        assert_alone(model, handle, max_new_tokens=4)


def test_every_request_ends_by_its_own_rules():
    model = tiny_model("llama")
    first, second, third = prompts(6, 9, 4)
    answer = alone(model, first, max_new_tokens=12)
    with ContinuousBatcher(model, num_blocks=64) as batcher:
        by_eos = batcher.submit(first, max_new_tokens=12, eos_token_id=answer[4])
        by_length = batcher.submit(first, generation_config=GenerationConfig(max_length=len(first) + 3))
        by_criterion = batcher.submit(first, max_new_tokens=12, stopping_criteria=[StopAt(len(first) + 2)])
        at_once = batcher.submit(third, max_new_tokens=1)
        long = batcher.submit(second, max_new_tokens=30, min_new_tokens=30, eos_token_id=list(range(1, 40)))
        assert (by_eos.result().tokens, by_eos.result().finish_reason) == (answer[: answer.index(answer[4]) + 1], "eos")
        assert (by_length.result().tokens, by_length.result().finish_reason) == (answer[:3], "length")
        assert (by_criterion.result().tokens, by_criterion.result().finish_reason) == (answer[:2], "stopped")
        assert at_once.result().tokens == alone(model, third, max_new_tokens=1)
        expected = alone(model, second, max_new_tokens=30, min_new_tokens=30, eos_token_id=list(range(1, 40)))
        assert long.result().tokens == expected


class StopAt(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_time_limits_count_from_the_request():
    model = tiny_model("llama")

    class Slow(LogitsProcessor):
        def __call__(self, input_ids, scores):
            time.sleep(0.01)
            return scores

    with ContinuousBatcher(model, num_blocks=64) as batcher:
        limited = batcher.submit([1, 2, 3], max_new_tokens=400, max_time=0.1, logits_processor=[Slow()])
        result = limited.result()
        assert result.finish_reason == "stopped" and 2 <= len(result.tokens) < 200


def test_processors_and_prefixes_are_called_with_the_row_alone():
    model = tiny_model("llama")
    seen = []

    class Only(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(input_ids.tolist())
            return scores.index_fill(1, torch.tensor([9]), 1e4)

    with ContinuousBatcher(model, num_blocks=64) as batcher:
        other = batcher.submit([5, 6, 7, 8], max_new_tokens=6)
        one = batcher.submit([1, 2, 3], max_new_tokens=3, logits_processor=[Only()])
        allowed = batcher.submit([1, 2], max_new_tokens=3, prefix_allowed_tokens_fn=lambda batch, ids: [11, 12])
        batcher.run()
        assert one.tokens == [9, 9, 9] and seen == [[[1, 2, 3]], [[1, 2, 3, 9]], [[1, 2, 3, 9, 9]]]
        assert set(allowed.tokens) <= {11, 12}
        assert_alone(model, other, max_new_tokens=6)


# What is refused ------------------------------------------------------------------------------------------------------

REFUSED = (
    ({"num_beams": 4}, "num_beams=4"),
    ({"assistant_model": tiny_model("llama", seed=1)}, "assistant_model="),
    ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
    ({"assistant_early_exit": 2}, "assistant_early_exit=2"),
    ({"is_assistant": True}, "is_assistant=True"),
    ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
    ({"output_scores": True}, "output_scores=True"),
    ({"return_dict_in_generate": True}, "return_dict_in_generate=True"),
    ({"cache_implementation": "static"}, "cache_implementation='static'"),
    ({"use_cache": False}, "use_cache=False"),
    ({"token_healing": True}, "token_healing=True"),
    ({"pixel_values": torch.zeros(1)}, "pixel_values="),
    ({"attention_mask": torch.ones(1, 3)}, "attention_mask="),
    ({"custom_generate": "some/repo"}, "custom_generate="),
    ({"generation_config": GenerationConfig(num_beams=2)}, "num_beams=2"),
)


@pytest.mark.parametrize(("options", "name"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_honoured_is_refused_by_name(options, name):
    with ContinuousBatcher(tiny_model("llama"), num_blocks=16) as batcher:
        with pytest.raises(NotImplementedError) as caught:
            batcher.submit([1, 2, 3], **options)
        assert name in str(caught.value) and "model.generate(" in str(caught.value)
        assert batcher.is_idle


def test_what_generate_refuses_is_refused():
    with ContinuousBatcher(tiny_model("llama"), num_blocks=16) as batcher:
        with pytest.raises(ValueError, match="num_return_sequences"):
            batcher.submit([1, 2], num_return_sequences=3)  # greedily
        with pytest.raises(ValueError, match="tokenizer"):
            batcher.submit([1, 2], stop_strings=["x"])
        with pytest.raises(TypeError, match=r"max_new_token= is not known; did you mean max_new_tokens="):
            batcher.submit([1, 2], max_new_token=1)
        for prompt in (3, [[1, 2]], [1.5], ["a"]):
            with pytest.raises(TypeError, match="a prompt is a list of token ids"):
                batcher.submit(prompt)


@pytest.mark.parametrize(
    ("prompt", "message"),
    (([], "empty"), ("text", "tokenizer"), ([1, VOCAB], "does not know"), ([-1], "does not know")),
    ids=("empty", "text", "too large", "negative"),
)
def test_prompts_that_are_none(prompt, message):
    with ContinuousBatcher(tiny_model("llama"), num_blocks=16) as batcher:
        with pytest.raises(ValueError, match=message):
            batcher.submit(prompt)
        for tensor in (torch.zeros(2, 3, dtype=torch.long), torch.zeros(3)):
            with pytest.raises(ValueError, match="one row"):
                batcher.submit(tensor)
        assert batcher.submit(torch.tensor([[4, 5]]), max_new_tokens=2).prompt_ids == [4, 5]


def test_a_request_that_can_never_fit_fails_at_once_and_the_others_go_on():
    model = tiny_model("llama")
    with ContinuousBatcher(model, num_blocks=8, block_size=4) as batcher:
        fits = batcher.submit([1, 2, 3], max_new_tokens=8)
        batcher.step()
        with pytest.raises(RequestTooLongError, match="max_new_tokens"):
            batcher.submit([1, 2, 3], max_new_tokens=31)
        assert_alone(model, fits, max_new_tokens=8)


def test_positions_that_the_model_does_not_have_are_refused():
    model = build_model("gpt2", n_positions=32)
    with ContinuousBatcher(model, num_blocks=64) as batcher:
        assert len(batcher.submit([1, 2], max_new_tokens=30).result().tokens) == 30
        with pytest.raises(NotImplementedError, match="beyond 32"):
            batcher.submit([1, 2], max_new_tokens=31)


@pytest.mark.parametrize("kind", ("dynamic", "longrope"))
def test_rotary_frequencies_that_depend_on_the_longest_row(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {"long_factor": [2.0] * 8, "short_factor": [1.0] * 8, "original_max_position_embeddings": 32}
    model = build_model("llama", max_position_embeddings=32, rope_parameters=rope)
    with ContinuousBatcher(model, num_blocks=64) as batcher:
        handle = batcher.submit([1, 2], max_new_tokens=30)
        with pytest.raises(NotImplementedError, match="rotary frequencies"):
            batcher.submit([1, 2], max_new_tokens=31)
        assert_alone(model, handle, max_new_tokens=30)


@pytest.mark.parametrize("family", ("qwen3_next", "falcon_h1"))
def test_models_with_states_are_refused(family):
    model = build_model(family)
    with pytest.raises(NotImplementedError, match="states would run from one row into the next"):
        ContinuousBatcher(model, num_blocks=16)
    assert model.config._attn_implementation != IMPLEMENTATION


def test_a_model_whose_tokens_do_not_keep_to_themselves_is_refused():
    model = build_model("llama")

    def leak(module, args, output):
        return output + 0.1 * output.roll(1, dims=1)

    model.model.layers[0].mlp.register_forward_hook(leak)
    with pytest.raises(NotImplementedError, match="do not keep to their own sequence"):
        ContinuousBatcher(model, num_blocks=16)


def test_training_mode_is_refused():
    model = build_model("llama").train()
    with pytest.raises(NotImplementedError, match="eval"):
        ContinuousBatcher(model, num_blocks=16)


# Threads, cancelling and faults --------------------------------------------------------------------------------------


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


def test_adapters():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        build_model("llama"), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    model.eval()
    with ContinuousBatcher(model, num_blocks=64) as batcher:
        handles = [batcher.submit(p, max_new_tokens=8) for p in prompts(5, 9)]
        batcher.run()
        for handle in handles:
            assert handle.tokens == alone(model, handle.prompt_ids, max_new_tokens=8)


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
        with pytest.raises(QueueFullError, match="2 requests"):
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


@pytest.mark.parametrize("seed", range(6))
def test_random_work(seed):
    """Requests of all kinds at random times, cancelled at random, in a pool that holds few of them."""
    dice, model = random.Random(seed), tiny_model(("llama", "mistral", "gemma2")[seed % 3])
    options = (
        {},
        {"repetition_penalty": 1.3},
        {"do_sample": True, "temperature": 0.8},
        {"do_sample": True, "top_k": 4},
    )
    made = []
    with ContinuousBatcher(
        model,
        num_blocks=24,
        block_size=4,
        max_step_tokens=dice.choice((6, 20, 64)),
        max_rows=5,
        prefix_cache=dice.random() < 0.5,
    ) as batcher:
        [shared] = prompts(12, seed=99)
        for number in range(20):
            [tail] = prompts(dice.randint(1, 20), seed=100 * seed + number)
            prompt = tail if dice.random() < 0.6 else shared + tail
            own = {"max_new_tokens": dice.randint(1, 20), **dice.choice(options)}
            made.append((batcher.submit(prompt, seed=number, priority=dice.randint(0, 1), **own), number, own))
            if dice.random() < 0.15:
                dice.choice(made)[0].cancel()
            for _ in range(dice.randint(0, 4)):
                batcher.step()
        batcher.run()
        for handle, number, own in made:
            torch.manual_seed(number)
            expected = alone(model, handle.prompt_ids, **own)
            if handle.result().finish_reason == "cancelled":
                assert handle.tokens == expected[: len(handle.tokens)]
            else:
                assert handle.tokens == expected, own
        assert batcher.is_idle
        assert_all_free(batcher)


def test_pads_are_no_padding_here():
    """A prompt may hold the pad token: generate() would guess that it is padding if it were given no mask."""
    model = tiny_model("llama")
    with ContinuousBatcher(model, num_blocks=16) as batcher:
        assert_alone(model, batcher.submit([PAD, 5, PAD, 6], max_new_tokens=8), max_new_tokens=8)


def test_half_precision():
    model = build_model("llama").to(torch.bfloat16)
    with ContinuousBatcher(model, num_blocks=64) as batcher:
        handles = [batcher.submit(p, max_new_tokens=4) for p in prompts(5, 20, 9)]
        batcher.run()
        assert all(len(handle.result().tokens) == 4 for handle in handles)
        assert batcher.pool.storages[0].key_blocks.dtype == torch.bfloat16


def test_packed_linears_stay_packed():
    model = build_model("llama")
    report = pack_linears(model, min_speedup=0.0)
    asked = prompts(5, 9)
    for _ in range(2):
        results = generate_many(model, asked, max_new_tokens=8, num_blocks=64)
        assert [result.tokens for result in results] == [alone(model, p, max_new_tokens=8) for p in asked]
        packed = [module for module in model.modules() if type(module).__name__ == "PackedLinear"]
        assert len(packed) == report.packed > 0


def refused(model, message: str) -> BaseException | None:
    with pytest.raises(NotImplementedError, match=message) as caught:
        ContinuousBatcher(model, num_blocks=16)
    assert type(model).__name__ in str(caught.value) and model.config._attn_implementation != IMPLEMENTATION
    return caught.value.__cause__


@pytest.mark.parametrize("error", (TypeError, ValueError, RuntimeError, AttributeError, KeyError, AssertionError))
@pytest.mark.parametrize("alone", (True, False))
def test_an_error_from_inside_the_model_is_a_refusal_that_tells_it(error, alone):
    model = build_model("llama")

    def fail(module, args, kwargs):
        if alone or kwargs.get(cache_keyword(model)) is not None:
            raise error("no such\n    thing")

    model.model.layers[1].self_attn.register_forward_pre_hook(fail, with_kwargs=True)
    doing = "does not run with tokens alone" if alone else "fails when several sequences are fed side by side"
    assert isinstance(refused(model, f"{doing}.*{error.__name__}.*no such.*thing"), error)


def test_a_machine_without_memory_is_no_model_that_cannot_be_batched():
    model = build_model("llama")

    def fail(module, args):
        raise torch.OutOfMemoryError("none left")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        ContinuousBatcher(model, num_blocks=16)
    hook.remove()
    with ContinuousBatcher(model, num_blocks=16) as batcher:
        assert_alone(model, batcher.submit([1, 2, 3], max_new_tokens=3), max_new_tokens=3)


def behaving(model, forward) -> None:
    """Let the model's second attention call `forward(its own, cache, keyword arguments)`, in packed steps alone."""
    attention = model.model.layers[1].self_attn
    own = attention.forward

    def instead(*args, **kwargs):
        cache = kwargs.get(cache_keyword(model))
        return own(*args, **kwargs) if cache is None else forward(lambda **more: own(*args, **(kwargs | more)), cache)

    attention.forward = instead


def test_a_layer_that_stores_twice_in_a_step_is_refused():
    """Its second keys would take the place of the first: a little wrong, which no comparison need notice."""
    model = build_model("llama")

    def twice(own, cache):
        own()
        return own()

    behaving(model, twice)
    refused(model, "stores keys and values more than once")


def test_attention_past_the_cache_is_refused():
    """It would see the other sequences."""
    model = build_model("llama")
    behaving(model, lambda own, cache: own(**{cache_keyword(model): None}))
    refused(model, "attends to keys that are not in the cache")


def test_reading_and_copying_layers_of_the_cache_is_refused():
    model = build_model("llama")
    behaving(model, lambda own, cache: (cache.layers[0].keys, own())[1])
    refused(model, "reads keys and values out of the cache")
    model = build_model("llama")
    behaving(model, lambda own, cache: (copy.deepcopy(cache.layers[0]), own())[1])
    refused(model, "adds copies of layers")


def test_masks_that_reach_no_layer_are_no_reason_and_one_that_does_is():
    """Models make masks for kinds of layers that they may have."""
    for model_type, name in (("qwen2_moe", "Qwen2MoeForCausalLM"), ("ministral", "MinistralForCausalLM")):
        model = build(model_type, name, "CAUSAL_LM")
        with ContinuousBatcher(model, num_blocks=16) as batcher:
            assert_alone(model, batcher.submit([4, 5, 6], max_new_tokens=12), max_new_tokens=12)
    refused(build("moshi", "MoshiForCausalLM", "CAUSAL_LM"), "masks say more than causal order|no kernel expresses")


@pytest.mark.parametrize(
    ("model_type", "name"),
    (("bart", "BartForCausalLM"), ("whisper", "WhisperForCausalLM"), ("roberta", "RobertaForCausalLM")),
)
def test_models_that_count_positions_themselves_are_told_them(model_type, name):
    """By the length of the cache (BART), or otherwise than generate() does (RoBERTa)."""
    model = build(model_type, name, "CAUSAL_LM")
    with ContinuousBatcher(model, num_blocks=40, block_size=4, max_step_tokens=5) as batcher:
        handles = [batcher.submit(p, max_new_tokens=12) for p in prompts(5, 11, 3)]
        batcher.run()
        with pytest.raises(NotImplementedError, match="beyond 128 it has no embeddings"):
            batcher.submit([1, 2, 3], max_new_tokens=126)
    for handle in handles:
        assert_alone(model, handle, max_new_tokens=12)
    assert not any(module._forward_pre_hooks for module in model.modules() if isinstance(module, torch.nn.Embedding))


def test_positions_are_those_that_generate_gives():
    model = build_model("llama")
    prepare = model.prepare_inputs_for_generation

    def later(*args, **kwargs):
        inputs = prepare(*args, **kwargs)
        inputs["position_ids"] = inputs["position_ids"] * factor + 5
        return inputs

    model.prepare_inputs_for_generation, factor = later, 1
    with ContinuousBatcher(model, num_blocks=16) as batcher:
        handle = batcher.submit([4, 5, 6], max_new_tokens=8)
        assert handle.result().tokens == alone(model, [4, 5, 6], max_new_tokens=8)
        positions = runner._given_by_generate(model)[0]
        assert positions.name == "position_ids" and positions.first.tolist() == [[5]] and positions.counts
    model = build_model("llama")
    prepare, factor = model.prepare_inputs_for_generation, 2
    model.prepare_inputs_for_generation = later
    refused(model, "position_ids that do not follow")


def test_a_models_own_use_cache_false_is_no_wish_of_the_request():
    model = build_model("mpt")
    model.generation_config.use_cache = False  # as MPT's configs say
    with ContinuousBatcher(model, num_blocks=16) as batcher:
        assert_alone(model, batcher.submit([4, 5, 6], max_new_tokens=4), max_new_tokens=4)
        with pytest.raises(NotImplementedError, match="use_cache=False"):
            batcher.submit([4, 5, 6], generation_config=GenerationConfig(use_cache=False))


def test_sinusoidal_positions_end_as_well():
    with (
        ContinuousBatcher(build("ctrl", "CTRLLMHeadModel", "CAUSAL_LM"), num_blocks=16) as batcher,
        pytest.raises(NotImplementedError, match="beyond 128"),
    ):
        batcher.submit([1, 2, 3], max_new_tokens=126)


def test_samples_have_processors_of_their_own():
    """SynthID's watermark keeps a state for each row."""
    model, [prompt] = tiny_model("llama"), prompts(7)
    mark = SynthIDTextWatermarkingConfig(keys=[1, 2, 3, 4, 5, 6, 7], ngram_len=3)
    options = {"max_new_tokens": 12, "top_k": 0, "do_sample": True, "watermarking_config": mark}
    results = generate_many(model, [Request(prompt, num_return_sequences=3)], seed=4, num_blocks=30, **options)
    for number, result in enumerate(results):
        torch.manual_seed(4 + number)
        assert result.tokens == alone(model, prompt, **options)


def test_what_a_model_says_of_its_own_caching_is_no_wish_of_the_request():
    model, [prompt] = build_model("llama"), prompts(7)
    expected = alone(model, prompt, max_new_tokens=4)
    model.generation_config.cache_implementation = "hybrid"
    with ContinuousBatcher(model, num_blocks=16) as batcher:
        assert batcher.submit(prompt, max_new_tokens=4).result().tokens == expected
        with pytest.raises(NotImplementedError, match="cache_implementation='hybrid'"):
            batcher.submit(prompt, cache_implementation="hybrid")


def test_a_criterion_of_length_that_is_reached_already_lets_one_token_through():
    model, [prompt] = tiny_model("llama"), prompts(7)
    options = {"stopping_criteria": [MaxLengthCriteria(3)], "repetition_penalty": 1.3, "max_new_tokens": 5}
    [result] = generate_many(model, [prompt], num_blocks=16, **options)
    assert result.tokens == alone(model, prompt, **options) and len(result.tokens) == 1


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


def test_a_batcher_may_be_collected_while_another_is_made(monkeypatch):
    """The garbage collector runs when it likes, also while a model is being enabled."""
    old, new = build_model("llama"), build_model("llama")
    before, forgotten, enable = old.config._attn_implementation, [ContinuousBatcher(old, num_blocks=16)], []

    def collect(model):
        forgotten.clear()
        gc.collect()
        enable.append(model)
        return enable_paged_attention(model)

    monkeypatch.setattr(enabler, "enable_paged_attention", collect)
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
