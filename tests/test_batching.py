"""Continuous batching: every request's tokens are those of its own generate() call, whatever else is in the batch."""

from __future__ import annotations

import random
import time

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
    BlockPool,
    ContinuousBatcher,
    PagedCache,
    Request,
    enable_paged_attention,
    generate_many,
    pack_linears,
    use_backend,
)
from hf_paged.batching import runner
from hf_paged.sweep.tiny import build
from tests.batching_checks import alone, assert_all_free, assert_alone, prompts, refused
from tests.helpers import PAD, build_model, generate, tiny_model

FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss", "gpt2", "qwen3", "bloom", "falcon", "mpt", "gpt_neo")


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


def test_samples_have_processors_of_their_own():
    """SynthID's watermark keeps a state for each row."""
    model, [prompt] = tiny_model("llama"), prompts(7)
    mark = SynthIDTextWatermarkingConfig(keys=[1, 2, 3, 4, 5, 6, 7], ngram_len=3)
    options = {"max_new_tokens": 12, "top_k": 0, "do_sample": True, "watermarking_config": mark}
    results = generate_many(model, [Request(prompt, num_return_sequences=3)], seed=4, num_blocks=30, **options)
    for number, result in enumerate(results):
        torch.manual_seed(4 + number)
        assert result.tokens == alone(model, prompt, **options)


def test_a_criterion_of_length_that_is_reached_already_lets_one_token_through():
    model, [prompt] = tiny_model("llama"), prompts(7)
    options = {"stopping_criteria": [MaxLengthCriteria(3)], "repetition_penalty": 1.3, "max_new_tokens": 5}
    [result] = generate_many(model, [prompt], num_blocks=16, **options)
    assert result.tokens == alone(model, prompt, **options) and len(result.tokens) == 1
