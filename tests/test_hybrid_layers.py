"""Layers with attention and a recurrent state side by side."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import (
    WAYS,
    assert_unchanged,
    check_books,
    forward,
    generate,
    generate_dynamic,
    random_prompts,
    run_way,
    same_tokens,
    snapshot,
    tiny_model,
)

from hf_paged import PagedCache

every_way = pytest.mark.parametrize("way", WAYS)


@pytest.mark.smoke
@every_way
@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next"])
def test_tokens_are_the_ordinary_caches(way: str, family: str) -> None:
    model = tiny_model(family)
    ids, mask = random_prompts((3, 17, 9))
    with run_way(model, way):
        cache = PagedCache(model.config, block_size=4)
        got = generate(model, ids, mask, cache, max_new_tokens=20)
        check_books(cache)
        beams = generate(model, ids, mask, PagedCache(model.config), num_beams=3)
    assert torch.equal(got, generate_dynamic(model, ids, mask, max_new_tokens=20))
    assert torch.equal(beams, generate_dynamic(model, ids, mask, num_beams=3))


@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next"])
def test_a_crop_that_the_state_refuses_changes_nothing(family: str) -> None:
    model = tiny_model(family)
    ids, _ = random_prompts((11, 11))
    cache = PagedCache(model.config, block_size=4)
    with torch.no_grad():
        forward(model, ids[:, :8], cache)
        before = snapshot(cache)
        with pytest.raises(RuntimeError, match="past"):
            cache.crop(-2)
        assert_unchanged(cache, before)
        got = forward(model, ids[:, 8:], cache).logits
        want = model(input_ids=ids).logits[:, 8:]
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


@every_way
def test_both_parts_go_with_the_rows(way: str) -> None:
    """Copies, picked rows, a second turn and a reset take the state along."""
    model = tiny_model("falcon_h1")
    ids, _ = random_prompts((11, 11))
    with run_way(model, way), torch.no_grad():
        cache = PagedCache(model.config, block_size=4)
        forward(model, ids[:, :8], cache)
        twin = copy.deepcopy(cache)
        twin.batch_select_indices(torch.tensor([1]))
        got = forward(model, ids[:, 8:], cache).logits
        other = forward(model, ids[1:, 8:], twin).logits
        check_books(cache, twin)
        cache.reset()
        again = forward(model, ids, cache).logits
    want = model(input_ids=ids).logits
    for actual, expected in ((got, want[:, 8:]), (other, want[1:, 8:]), (again, want)):
        torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


def test_they_cannot_be_forked_by_rows_and_decode_eagerly() -> None:
    model = tiny_model("falcon_h1")
    ids, mask = random_prompts((5, 9))
    cache = PagedCache(model.config)
    with run_way(model, "compiled"):
        got = generate(model, ids, mask, cache)
    same_tokens(model, got, generate_dynamic(model, ids, mask), mask)
    assert "state" in cache.compiled.impossible_because()
    with pytest.raises(NotImplementedError, match="recurrent state"):
        cache.fork([0])
