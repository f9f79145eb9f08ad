"""Rows that end while others go on: they store nothing more, and their blocks are there for whoever needs them."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    ENABLED_WAYS,
    WAYS,
    blocks_for,
    check_books,
    generate,
    generate_dynamic,
    random_prompts,
    run_way,
    same_tokens,
    tiny_model,
)
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from hf_paged import BlockPool, OutOfBlocksError, PagedCache, paged_attention

PROMPT, NEW = 40, 64


def two_that_end_early(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor, list[int], torch.Tensor]:
    """Four prompts of one length, EOS tokens with which the first two rows end after a few tokens, and the outcome."""
    ids, mask = random_prompts([PROMPT] * 4)
    tokens = generate_dynamic(model, ids, mask, max_new_tokens=NEW)
    eos = [int(tokens[row, PROMPT + 5]) for row in (0, 1)]
    expected = generate_dynamic(model, ids, mask, max_new_tokens=NEW, eos_token_id=eos)
    lengths = (expected != 0).sum(1)
    assert lengths[:2].max() < PROMPT + 8 and lengths[2] >= PROMPT + 50, "the random model has changed"
    return ids, mask, eos, expected


@pytest.mark.smoke
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mistral"])
def test_rows_without_padding_that_end_at_different_times(family: str, way: str) -> None:
    """transformers then passes no mask at all."""
    model = tiny_model(family)
    ids, mask = random_prompts([20] * 3)
    tokens = generate_dynamic(model, ids, mask, max_new_tokens=16)
    eos = [int(tokens[row, 20 + 3 + row]) for row in range(2)]
    expected = generate_dynamic(model, ids, mask, max_new_tokens=16, eos_token_id=eos)
    cache = PagedCache(model.config, block_size=4)
    with run_way(model, way):
        actual = generate(model, ids, mask, cache, max_new_tokens=16, eos_token_id=eos)
    same_tokens(model, actual, expected, mask)
    check_books(cache)


@pytest.mark.parametrize("way", ENABLED_WAYS)
def test_the_peak_is_that_of_the_rows_that_go_on(way: str) -> None:
    model = tiny_model("llama")
    ids, mask, eos, expected = two_that_end_early(model)
    # When the first two have ended, the others alone grow: 102 and 50 tokens; before, four rows of 45.
    least = max(blocks_for([102, 64], 16), blocks_for([45] * 4, 16))
    with run_way(model, way):
        cache = PagedCache(model.config, num_blocks=least)
        assert torch.equal(generate(model, ids, mask, cache, max_new_tokens=NEW, eos_token_id=eos), expected)
        assert cache.stats().peak_blocks <= least
        check_books(cache)
        roomy = PagedCache(model.config, num_blocks=4 * least)
        generate(model, ids, mask, roomy, max_new_tokens=NEW, eos_token_id=eos)
    assert roomy.stats().peak_blocks == cache.stats().peak_blocks
    assert roomy.row_lengths[:2] != [0, 0], "nobody needed their blocks"
    assert 0 in cache.row_lengths[:2]


def test_too_small_is_too_small() -> None:
    model = tiny_model("llama")
    ids, mask, eos, _ = two_that_end_early(model)
    with paged_attention(model):
        cache = PagedCache(model.config, num_blocks=9)
        with pytest.raises(OutOfBlocksError):
            generate(model, ids, mask, cache, max_new_tokens=NEW, eos_token_id=eos)
        check_books(cache)
        cache.reset()
        assert cache.stats().free_blocks == 9


def test_a_later_turn_is_right_or_says_what_is_gone() -> None:
    model = tiny_model("llama")
    ids, mask, eos, first = two_that_end_early(model)
    more, _ = random_prompts([5] * 4, seed=9)
    whole = torch.cat([first, more], 1)
    ended = torch.isin(first[:, PROMPT:], torch.tensor(eos)).long().cumsum(1)
    real = torch.cat([mask, (ended - torch.isin(first[:, PROMPT:], torch.tensor(eos)).long() < 1).long()], 1)
    whole_mask = torch.cat([real, torch.ones_like(more)], 1)
    with paged_attention(model):
        roomy, tight = (PagedCache(model.config, num_blocks=blocks) for blocks in (200, 12))
        for cache in (roomy, tight):
            generate(model, ids, mask, cache, max_new_tokens=NEW, eos_token_id=eos)
        second = generate(model, whole, whole_mask, roomy, max_new_tokens=6)
        held = tight.row_lengths
        with pytest.raises(ValueError, match="had ended and whose blocks others needed"):
            generate(model, whole, whole_mask, tight, max_new_tokens=6)
        assert tight.row_lengths == held
        check_books(tight)
        # The rows that were kept go on.
        kept = [row for row, length in enumerate(held) if length]
        tight.batch_select_indices(torch.tensor(kept))
        again = generate(model, whole[kept], whole_mask[kept], tight, max_new_tokens=6)
    for row in range(4):  # each as if it had been alone, without the padding between its turns
        alone = whole[row][whole_mask[row].bool()][None]
        expected = generate_dynamic(model, alone, torch.ones_like(alone), max_new_tokens=6)[0, -6:]
        assert torch.equal(second[row, -6:], expected)
        if row in kept:
            assert torch.equal(again[kept.index(row), -6:], expected)


class OtherWork(StoppingCriteria):
    """Runs another generate() on the same pool once the first row has ended."""

    def __init__(self, run) -> None:
        self.run, self.eos_steps = run, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        self.eos_steps += 1
        if self.eos_steps == 30:
            self.run()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_blocks_of_ended_rows_serve_other_caches_on_the_pool() -> None:
    model = tiny_model("llama")
    ids, mask, eos, expected = two_that_end_early(model)
    other_ids, other_mask = random_prompts([70], seed=4)
    other_expected = generate_dynamic(model, other_ids, other_mask, max_new_tokens=8)
    pool = BlockPool(num_blocks=17)
    seen = []

    def other() -> None:
        assert cache.stats().free_blocks >= 5 > 17 - sum(len(rows) for rows in cache.block_tables["full_attention"])
        second = PagedCache(model.config, pool=pool)
        seen.append(generate(model, other_ids, other_mask, second, max_new_tokens=8))

    with paged_attention(model):
        cache = PagedCache(model.config, pool=pool)
        criteria = StoppingCriteriaList([OtherWork(other)])
        actual = generate(model, ids, mask, cache, max_new_tokens=NEW, eos_token_id=eos, stopping_criteria=criteria)
    assert torch.equal(seen[0], other_expected) and torch.equal(actual, expected)
    assert cache.row_lengths[0] == 0 or cache.row_lengths[1] == 0
    check_books(cache)
