"""generate_many and iterate_many: what comes back, in which order, and what is said on the way."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor

from hf_paged import (
    BatchError,
    BlockPool,
    GenerationResult,
    NewToken,
    Request,
    RequestTooLongError,
    generate_many,
    iterate_many,
)
from hf_paged.batching import runner
from tests.batching_checks import alone, prompts
from tests.helpers import build_model, tiny_model

POOL = {"num_blocks": 64, "block_size": 4}


def test_results_come_in_the_order_of_the_prompts():
    model = tiny_model("llama")
    asked = prompts(30, 2, 17)
    given = [asked[0], torch.tensor(asked[1]), torch.tensor([asked[2]])]
    results = generate_many(model, given, max_new_tokens=6, **POOL)
    assert [result.index for result in results] == [0, 1, 2]
    for prompt, result in zip(asked, results, strict=True):
        assert result.prompt_ids == prompt and result.tokens == alone(model, prompt, max_new_tokens=6)
        assert result.sequence == prompt + result.tokens
        assert result.text is None and result.finish_reason == "length" and result.error is None
        assert 0 < result.seconds_to_first_token <= result.seconds
        assert json.loads(json.dumps(result.as_dict()))["tokens"] == result.tokens


def test_requests_have_arguments_of_their_own():
    model = tiny_model("llama")
    first, second = prompts(5, 9)
    config = GenerationConfig(max_new_tokens=4)
    results = generate_many(model, [first, Request(second, max_new_tokens=7), Request(first, seed=3)], config, **POOL)
    assert [len(result.tokens) for result in results] == [4, 7, 4]
    assert config.max_new_tokens == 4
    assert repr(Request([1], max_new_tokens=2)) == "Request([1], max_new_tokens=2)"


def test_seeds_count_up():
    model = tiny_model("llama")
    asked = prompts(5, 9)
    results = generate_many(model, asked, seed=10, do_sample=True, max_new_tokens=8, **POOL)
    for number, (prompt, result) in enumerate(zip(asked, results, strict=True)):
        torch.manual_seed(10 + number)
        assert result.tokens == alone(model, prompt, do_sample=True, max_new_tokens=8)


def test_samples_of_a_prompt_stand_together():
    model = tiny_model("llama")
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 4}
    results = generate_many(model, prompts(5, 9), seed=0, **options, **POOL)
    assert [(r.index, r.sample) for r in results] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_results_as_they_are_done_and_tokens_as_they_come():
    model = tiny_model("llama")
    long, short = prompts(5, 9)
    asked = [Request(long, max_new_tokens=9), Request(short, max_new_tokens=3)]
    assert [result.index for result in iterate_many(model, asked, **POOL)] == [1, 0]
    tokens: dict[int, list[int]] = {0: [], 1: []}
    order = []
    for event in iterate_many(model, asked, tokens=True, **POOL):
        order.append(type(event))
        if isinstance(event, NewToken):
            tokens[event.index].append(event.token)
        else:
            assert event.tokens == tokens[event.index]
    assert order.index(GenerationResult) < len(order) - 1
    assert tokens == {0: alone(model, long, max_new_tokens=9), 1: alone(model, short, max_new_tokens=3)}


def test_an_iterator_that_is_left_gives_everything_back():
    model = build_model("llama")
    before, pool = model.config._attn_implementation, BlockPool(**POOL)
    events = iterate_many(model, prompts(5, 9, 30), max_new_tokens=20, tokens=True, pool=pool)
    next(events)
    assert pool.allocators[0].num_used
    events.close()
    assert pool.allocators[0].num_used == 0 and model.config._attn_implementation == before


class Fails(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raise ZeroDivisionError("mine")


def test_errors_are_raised_when_the_others_are_done():
    model = tiny_model("llama")
    good, bad = prompts(5, 9)
    asked = [Request(bad, logits_processor=[Fails()]), good]
    with pytest.raises(BatchError, match=r"1 of 2 requests failed.*number 0.*ZeroDivisionError: mine") as caught:
        generate_many(model, asked, max_new_tokens=5, **POOL)
    assert caught.value.results[1].tokens == alone(model, good, max_new_tokens=5)
    results = generate_many(model, asked, max_new_tokens=5, raise_errors=False, **POOL)
    assert isinstance(results[0].error, ZeroDivisionError) and results[0].finish_reason == "error"
    assert results[1].error is None
    assert "mine" in results[0].as_dict()["error"]


def test_what_cannot_be_served_is_said_before_anything_is_generated():
    model = build_model("llama")
    before = model.config._attn_implementation
    with pytest.raises(NotImplementedError, match="num_beams=3"):
        generate_many(model, [[1, 2], Request([1, 2], num_beams=3)], **POOL)
    for padded in ("a prompt", {"input_ids": [[1, 2]]}, torch.ones(2, 3, dtype=torch.long)):
        with pytest.raises(TypeError, match="a list of prompts"):
            generate_many(model, padded, **POOL)
    with pytest.raises(TypeError, match="input_ids"):
        generate_many(model, [{"input_ids": [1, 2]}], **POOL)
    with pytest.raises(ValueError, match="give them to BlockPool"):
        generate_many(model, [[1, 2]], pool=BlockPool(num_blocks=4), num_blocks=3)
    assert model.config._attn_implementation == before


def test_one_that_does_not_fit_need_not_stop_the_others():
    model = tiny_model("llama")
    [good] = prompts(5)
    asked = [Request([1, 2], max_new_tokens=10_000), good]
    results = generate_many(model, asked, max_new_tokens=5, raise_errors=False, **POOL)
    assert isinstance(results[0].error, RequestTooLongError) and results[0].tokens == []
    assert results[1].tokens == alone(model, good, max_new_tokens=5)
    with pytest.raises(BatchError, match="RequestTooLongError"):
        generate_many(model, asked, max_new_tokens=5, **POOL)


def test_no_prompts():
    assert generate_many(tiny_model("llama"), [], **POOL) == []
    assert list(iterate_many(tiny_model("llama"), [], **POOL)) == []


def test_a_progress_bar_counts_prompts(capsys):
    generate_many(tiny_model("llama"), prompts(5, 9), max_new_tokens=3, progress=True, **POOL)
    assert "2/2" in capsys.readouterr().err
    generate_many(tiny_model("llama"), prompts(5, 9), max_new_tokens=3, **POOL)
    assert capsys.readouterr().err == ""


@pytest.mark.smoke
def test_texts_with_the_real_model(smollm2):
    """Ragged chats, with stop strings and a streamer: each as generate() alone gives it."""
    model, tokenizer = smollm2
    texts = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time there was a", "def add(a, b):\n"]
    options = {"max_new_tokens": 16, "do_sample": False}
    results = generate_many(
        model,
        [*texts, Request(texts[1], stop_strings=["7"])],
        tokenizer=tokenizer,
        num_blocks=24,
        max_step_tokens=8,
        **options,
    )
    for text, result in zip([*texts, texts[1]], results, strict=True):
        ids = tokenizer(text, return_tensors="pt")
        stop = {"stop_strings": ["7"], "tokenizer": tokenizer} if result.index == 4 else {}
        expected = model.generate(**ids, **options, **stop)[0, ids["input_ids"].shape[1] :]
        assert result.tokens == expected.tolist()
        assert result.text == tokenizer.decode(expected, skip_special_tokens=True)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    [answer] = generate_many(model, [chat], tokenizer=tokenizer, num_blocks=24, **options)
    assert answer.prompt_ids == tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert "Paris" in answer.text
    assert results[4].finish_reason == "stopped" and results[4].text.endswith("7")


def test_stop_strings_of_the_model_itself(smollm2):
    model, tokenizer = smollm2
    runner._given.pop(model, None)
    runner._checked.pop(model, None)
    model.generation_config.stop_strings = ["7"]
    try:
        [result] = generate_many(model, ["1, 2, 3, 4,"], tokenizer=tokenizer, num_blocks=24, max_new_tokens=16)
    finally:
        model.generation_config.stop_strings = None
    assert result.finish_reason == "stopped" and result.text.endswith("7")
