"""A real model, SmolLM2-135M-Instruct: real prompts, a padded batch, sampling and a chat."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import generate, generate_dynamic, logits_alone, run_way, same_tokens
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_paged import PagedCache

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n",
    "Water boils at",
    "In 1969, the Apollo 11 mission landed the first humans on the Moon. The crew consisted of Neil Armstrong, Buzz "
    "Aldrin and Michael Collins. While two of them walked on the surface, the third stayed in orbit and",
    "Q: What do bees make?\nA: Honey.\nQ: What do cows give?\nA:",
)
WAYS = ("plain", "cpu")
NEW = 40


@pytest.fixture(scope="module")
def batch(smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> dict[str, torch.Tensor]:
    _, tokenizer = smollm2
    return dict(tokenizer(list(PROMPTS), return_tensors="pt", padding=True, padding_side="left"))


@pytest.fixture(scope="module")
def expected(smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Greedy tokens of each prompt from transformers' own cache."""
    model, tokenizer = smollm2
    return generate_dynamic(model, batch["input_ids"], batch["attention_mask"], **options(tokenizer))


def options(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {"max_new_tokens": NEW, "pad_token_id": tokenizer.pad_token_id}


@pytest.mark.parametrize("way", WAYS)
def test_a_padded_batch_of_real_prompts_equals_dynamic(
    smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    batch: dict[str, torch.Tensor],
    expected: torch.Tensor,
    way: str,
) -> None:
    model, tokenizer = smollm2
    assert len({tuple(row) for row in batch["attention_mask"].tolist()}) >= 5
    cache = PagedCache(model.config)
    with run_way(model, way):
        actual = generate(model, batch["input_ids"], batch["attention_mask"], cache, **options(tokenizer))
    same_tokens(model, actual, expected, batch["attention_mask"])
    assert "Paris" in tokenizer.decode(actual[0])
    if way != "plain":
        assert cache.stats().tokens < actual.numel() * 0.9


def test_each_row_equals_what_a_pass_without_a_cache_chooses(
    smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase], batch: dict[str, torch.Tensor], expected: torch.Tensor
) -> None:
    """The output that both ways are compared with is each row's own: one pass over the whole row says every choice."""
    model, tokenizer = smollm2
    width = batch["input_ids"].shape[1]
    for row, tokens in enumerate(expected):
        real = torch.cat((batch["attention_mask"][row].bool(), torch.ones(NEW, dtype=torch.bool)))
        new = tokens[width:]
        ends = (new == tokenizer.eos_token_id).nonzero()
        count = int(ends[0]) + 1 if len(ends) else NEW
        choices = logits_alone(model, tokens[real])[-NEW - 1 : -1].argmax(-1)
        alone = torch.cat((tokens[:width], choices))
        same_tokens(model, alone[: width + count], tokens[: width + count], batch["attention_mask"][row])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("row", [1, 2])
def test_a_real_prompt_alone_equals_its_row_of_the_batch(
    smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    batch: dict[str, torch.Tensor],
    expected: torch.Tensor,
    way: str,
    row: int,
) -> None:
    model, tokenizer = smollm2
    real = batch["attention_mask"][row].bool()
    ids = batch["input_ids"][row : row + 1, real]
    arguments = options(tokenizer) | {"max_new_tokens": 32}
    with run_way(model, way):
        alone = generate(model, ids, cache=PagedCache(model.config), **arguments)
    same_tokens(model, alone[0], torch.cat((ids[0], expected[row, len(real) :][: alone.shape[1] - ids.shape[1]])))


SAMPLING = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.8, "top_p": 0.9}


@pytest.fixture(scope="module")
def sampled(smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """20 tokens of each prompt sampled with a seed, from transformers' own cache."""
    model, tokenizer = smollm2
    torch.manual_seed(0)
    return generate_dynamic(model, batch["input_ids"], batch["attention_mask"], **(options(tokenizer) | SAMPLING))


@pytest.mark.parametrize("way", WAYS)
def test_sampling_real_text_with_a_seed(
    smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    batch: dict[str, torch.Tensor],
    sampled: torch.Tensor,
    way: str,
) -> None:
    model, tokenizer = smollm2
    torch.manual_seed(0)
    with run_way(model, way):
        output = generate(
            model,
            batch["input_ids"],
            batch["attention_mask"],
            PagedCache(model.config),
            **(options(tokenizer) | SAMPLING),
        )
    assert torch.equal(output, sampled)


@pytest.mark.parametrize("way", WAYS)
def test_a_chat_of_two_turns_on_one_cache(smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase], way: str) -> None:
    model, tokenizer = smollm2
    cache = PagedCache(model.config)
    messages: list[dict[str, str]] = []
    before = ""
    ids = torch.empty(1, 0, dtype=torch.long)
    fed: list[int] = []
    for question in ("Name a fruit that is yellow. Answer in one word.", "And one that is red?"):
        messages.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # Keep the very tokens of the turns before, whatever the template would make of their text.
        new = tokenizer(text[len(before) :], return_tensors="pt", add_special_tokens=False)["input_ids"]
        ids = torch.cat((ids, new), dim=1)
        fed.append(ids.shape[1] - cache.get_seq_length())
        with run_way(model, way):
            output = generate(model, ids, cache=cache, max_new_tokens=16, pad_token_id=tokenizer.pad_token_id)
        fresh = generate_dynamic(model, ids, max_new_tokens=16, pad_token_id=tokenizer.pad_token_id)
        same_tokens(model, output, fresh)
        answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        assert answer.strip()
        messages.append({"role": "assistant", "content": answer})
        before = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = output
    assert fed[1] < 40  # the second turn fed no more than its own text
    assert cache.row_lengths == [ids.shape[1] - 1]
