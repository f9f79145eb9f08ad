"""Prompts that generate() repeats, for beams or several samples: computed once, held once."""

from __future__ import annotations

import pytest
import torch
from helpers import check_books, fed, generate, generate_dynamic, random_prompts, run_way, tiny_model
from test_generate import RAGGED, assert_close, generate_paged, seeded

from hf_paged import PagedCache, enable_paged_attention, paged_attention

MANY_ROWS = [
    {"num_beams": 3},
    {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
    {"num_return_sequences": 3, "do_sample": True},
    {"num_return_sequences": 3, "do_sample": True, "prefill_chunk_size": 5},
]


@pytest.mark.smoke
@pytest.mark.parametrize("options", MANY_ROWS, ids=["beams", "beam_sampling", "samples", "samples_in_chunks"])
def test_a_prompt_of_several_rows_is_computed_once(options: dict) -> None:
    model = tiny_model("llama")
    ids, mask = random_prompts(RAGGED)
    options = options | {"max_new_tokens": 6}
    expected = seeded(generate_dynamic, model, ids, mask, **options)
    with fed(model) as shapes:
        tokens = seeded(generate_paged, model, "cpu", ids, mask, **options)
    assert torch.equal(tokens, expected)
    prompt, decode = [shape for shape in shapes if shape[0] == 3], [shape for shape in shapes if shape[0] == 9]
    assert sum(length for _, length in prompt) == ids.shape[1]
    assert decode == [(9, 1)] * 5 and len(prompt) + len(decode) == len(shapes)


@pytest.mark.parametrize("options", MANY_ROWS[:3], ids=["beams", "beam_sampling", "samples"])
def test_rows_hold_their_prompt_once(options: dict) -> None:
    model = tiny_model("llama")
    ids, mask = random_prompts([70, 41])
    cache = PagedCache(model.config, block_size=4)
    with run_way(model, "cpu"):
        generate(model, ids, mask, cache, max_new_tokens=5, **options)
    # 17 and 10 full blocks of the prompts; each of three rows has a copy of the last, partly filled one, and what it
    # grew by in four steps
    assert cache.stats().peak_blocks <= 17 + 10 + 2 * 3 * 2 + 2
    check_books(cache)


def test_sharing_prompts_can_be_turned_off() -> None:
    model = tiny_model("llama")
    ids, mask = random_prompts(RAGGED)
    options = {"num_return_sequences": 2, "do_sample": True, "max_new_tokens": 4}
    expected = seeded(generate_dynamic, model, ids, mask, **options)
    for shares in (False, True):
        with paged_attention(model, share_prompts=shares), fed(model) as shapes:
            with paged_attention(model):  # leaves the setting as it is
                pass
            assert torch.equal(seeded(generate, model, ids, mask, PagedCache(model.config), **options), expected)
        assert shapes[0] == ((3, 17) if shares else (6, 17))
    with paged_attention(model, share_prompts=False):
        enable_paged_attention(model, share_prompts=True)
        with fed(model) as shapes:
            generate(model, ids, mask, PagedCache(model.config), **options)
        assert shapes[0] == (3, 17)


@pytest.mark.parametrize("expanded", [False, True])
def test_a_second_turn_of_several_rows(expanded: bool) -> None:
    """The cache holds a row for each prompt, or one for each sequence: rows go on from what they hold."""
    model = tiny_model("llama")
    ids, mask = random_prompts(RAGGED)
    more = random_prompts([6, 6, 6], seed=5)[0]
    whole = torch.cat([ids, more], 1)
    whole_mask = torch.cat([mask, torch.ones_like(more)], 1)
    options = {"do_sample": True, "max_new_tokens": 6}
    expected = seeded(generate_dynamic, model, whole, whole_mask, num_return_sequences=2, **options)
    with paged_attention(model):
        cache = PagedCache(model.config)
        generate(model, ids, mask, cache, max_new_tokens=1)
        if expanded:
            cache.batch_repeat_interleave(2)
            whole, whole_mask = (x.repeat_interleave(2, 0) for x in (whole, whole_mask))
            tokens = seeded(generate, model, whole, whole_mask, cache, **options)
        else:
            tokens = seeded(generate, model, whole, whole_mask, cache, num_return_sequences=2, **options)
    assert torch.equal(tokens, expected)
    check_books(cache)


def test_hidden_states_and_scores_of_a_shared_prompt_are_those_of_its_rows() -> None:
    model = tiny_model("llama")
    ids, mask = random_prompts(RAGGED)
    options = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 5, "return_dict_in_generate": True}
    options |= {"output_scores": True, "output_hidden_states": True}
    expected = generate_dynamic(model, ids, mask, **options)
    actual = generate_paged(model, "cpu", ids, mask, **options)
    assert torch.equal(actual.sequences, expected.sequences)
    assert_close(actual.scores, expected.scores)
    assert_close(actual.sequences_scores, expected.sequences_scores)
    real = mask.repeat_interleave(2, 0).bool()
    for one, other in zip(actual.hidden_states[0], expected.hidden_states[0], strict=True):
        assert_close(one[real], other[real])
