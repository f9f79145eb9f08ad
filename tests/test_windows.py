"""Sliding windows: blocks that have left the window are freed, and nothing else changes."""

from __future__ import annotations

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

from hf_paged import BlockPool, OutOfBlocksError, PagedCache, paged_attention
from hf_paged.allocator import BlockAllocator, BlockTable

WINDOW = 8  # of the models in helpers.py
RAGGED = (3, 17, 9)
FAMILIES = ("mistral", "gemma2", "gpt_oss")

every_family = pytest.mark.parametrize("family", FAMILIES)
every_way = pytest.mark.parametrize("way", [*WAYS, "compiled"])


def windowed(cache: PagedCache) -> int:
    """The number of the group of windowed layers."""
    return next(i for i, group in enumerate(cache.pool.groups) if group.kind == "sliding_attention")


# Whole generate() calls -----------------------------------------------------------------------------------------------


@every_family
@every_way
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_tokens_are_the_ordinary_caches_and_blocks_are_freed(family: str, way: str, block_size: int) -> None:
    model = tiny_model(family)
    ids, mask = random_prompts(RAGGED)
    cache = PagedCache(model.config, block_size=block_size)
    with run_way(model, way):
        got = generate(model, ids, mask, cache, max_new_tokens=40)
    check_books(cache)
    same_tokens(model, got, generate_dynamic(model, ids, mask, max_new_tokens=40), mask)
    group = windowed(cache)
    for table, length in zip(cache._rows.tables[group], cache.row_lengths, strict=True):
        assert table.length == length
        held = length - table.first * block_size
        assert held <= WINDOW + block_size
        assert held >= min(length, WINDOW)
    full = [i for i in range(len(cache.pool.groups)) if i != group]
    assert all(table.first == 0 for i in full for table in cache._rows.tables[i])
    if family == "mistral":
        most = 3 * -(-(WINDOW + block_size) // block_size)
        assert cache.stats().used_blocks <= most
        assert cache.stats().waste < 1


@every_way
def test_a_pool_of_few_blocks_serves_any_length(way: str) -> None:
    model = tiny_model("mistral")
    ids, mask = random_prompts((6,))
    cache = PagedCache(model.config, block_size=4, num_blocks=4)
    with run_way(model, way):
        got = generate(model, ids, mask, cache, max_new_tokens=60)
    same_tokens(model, got, generate_dynamic(model, ids, mask, max_new_tokens=60), mask)
    assert cache.pool.allocators[0].peak_used <= 4


@every_family
@pytest.mark.parametrize("way", WAYS)
def test_turns_beams_and_drafts(family: str, way: str) -> None:
    model = tiny_model(family)
    ids, mask = random_prompts((15, 15))
    with run_way(model, way):
        cache = PagedCache(model.config, block_size=4)
        first = generate(model, ids, mask, cache, max_new_tokens=20)
        turn = torch.cat((first, ids[:, :6]), dim=1)
        got = generate(model, turn, None, cache, max_new_tokens=20)
        check_books(cache)
        beams = PagedCache(model.config, block_size=4)
        best = generate(model, ids, mask, beams, num_beams=3, max_new_tokens=20)
        check_books(beams)
        drafts = PagedCache(model.config, block_size=4)
        drafted = generate(model, ids[:1], mask[:1], drafts, prompt_lookup_num_tokens=5, max_new_tokens=40)
        check_books(drafts)
    same_tokens(model, got, generate_dynamic(model, turn, None, max_new_tokens=20))
    assert torch.equal(best, generate_dynamic(model, ids, mask, num_beams=3, max_new_tokens=20))
    same_tokens(model, drafted, generate_dynamic(model, ids[:1], mask[:1], max_new_tokens=40))


def test_chunks_of_a_prompt_free_as_they_go() -> None:
    model = tiny_model("mistral")
    ids, mask = random_prompts((64,))
    cache = PagedCache(model.config, block_size=4)
    with paged_attention(model):
        got = generate(model, ids, mask, cache, prefill_chunk_size=8)
    same_tokens(model, got, generate_dynamic(model, ids, mask), mask)
    # A chunk of 8 behind a window of 8, and the tails of two blocks.
    assert cache.pool.allocators[0].peak_used <= (8 + WINDOW) // 4 + 1


def test_a_pool_that_keeps_prompts_keeps_their_windows() -> None:
    model = tiny_model("mistral")
    ids, mask = random_prompts((40,))
    pool = BlockPool(block_size=4, prefix_cache=True)
    with paged_attention(model):
        for _ in range(2):
            got = generate(model, ids, mask, PagedCache(model.config, pool=pool), max_new_tokens=20)
            same_tokens(model, got, generate_dynamic(model, ids, mask, max_new_tokens=20), mask)


# Taking back ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["plain", "cpu"])
@torch.no_grad()
def test_what_the_last_pass_added_can_be_removed_and_more_cannot(way: str) -> None:
    model = tiny_model("mistral")
    ids, _ = random_prompts((30, 30))
    cache = PagedCache(model.config, block_size=2)
    with run_way(model, way):
        forward(model, ids[:, :20], cache)
        forward(model, ids[:, 20:26], cache)  # now blocks before token 13 are gone
        cache.crop(-6)
        got = forward(model, ids[:, 20:], cache).logits
        cache.crop(-5)
        before = snapshot(cache)
        with pytest.raises(ValueError, match="have left it"):
            cache.crop(-12)
        assert_unchanged(cache, before)
        forward(model, ids[:, 25:], cache)
    want = model(input_ids=ids).logits[:, 20:]
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-3)
    cache.crop(-1000)
    assert cache.get_seq_length() == 0
    check_books(cache)


@torch.no_grad()
def test_forks_go_on_by_themselves() -> None:
    model = tiny_model("gemma2")
    ids, _ = random_prompts((30, 30))
    with paged_attention(model):
        cache = PagedCache(model.config, block_size=4)
        forward(model, ids[:, :17], cache)
        twin = cache.fork([1, 0, 1])
        for at in range(17, 30):
            got = forward(model, ids[:, at : at + 1], cache).logits
            other = forward(model, ids[[1, 0, 1], at : at + 1], twin).logits
            torch.testing.assert_close(other, got[[1, 0, 1]])
        check_books(cache, twin)
    want = model(input_ids=ids).logits[:, -1:]
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-3)


@torch.no_grad()
def test_a_step_for_which_no_block_is_left_frees_none() -> None:
    model = tiny_model("gemma2")
    ids, _ = random_prompts((30,))
    cache = PagedCache(model.config, block_size=4, num_blocks=5)
    with paged_attention(model):
        with pytest.raises(OutOfBlocksError):
            for at in range(30):
                before = snapshot(cache) if at else None
                forward(model, ids[:, at : at + 1], cache)
        assert at == 20, "the full layers filled their five blocks"
        assert_unchanged(cache, before)


@torch.no_grad()
def test_a_mask_of_ones_own_over_freed_blocks_is_refused() -> None:
    model = tiny_model("mistral")
    ids, _ = random_prompts((30,))
    cache = PagedCache(model.config, block_size=4)
    with paged_attention(model):
        forward(model, ids[:, :20], cache)
        forward(model, ids[:, 20:21], cache)
        before = snapshot(cache)
        seen = torch.ones(1, 1, 1, 22, dtype=torch.bool)
        with pytest.raises(NotImplementedError, match="left its window of 8"):
            forward(model, ids[:, 21:22], cache, attention_mask=seen)
        assert_unchanged(cache, before)
        forward(model, ids[:, 21:22], cache)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
@pytest.mark.parametrize("way", [*WAYS, "triton"])
@torch.no_grad()
def test_other_rows_write_into_blocks_that_were_freed(way: str) -> None:
    """Nothing reads a freed block, whatever is in it."""
    model = tiny_model("mistral")
    ids, _ = random_prompts((40, 40))
    cache = PagedCache(model.config, block_size=16 if way == "triton" else 4)
    with run_way(model, way):
        forward(model, ids[:, :30], cache)
        forward(model, ids[:, 30:31], cache)
        held = {block for row in cache.block_tables["sliding_attention(8)"] for block in row}
        freed = set(range(cache.pool.allocators[0].high_water)) - held
        assert freed
        for storage in cache.pool.storages.values():
            storage.kv[list(freed)] = float("nan")
        got = torch.cat([forward(model, ids[:, 31:37], cache).logits, forward(model, ids[:, 37:], cache).logits], 1)
    want = model(input_ids=ids).logits[:, 31:]
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-3)


# Books ----------------------------------------------------------------------------------------------------------------


def test_what_has_left_is_usable_at_once() -> None:
    allocator = BlockAllocator(3, 4)
    table = BlockTable()
    allocator.grow([table], [12])
    assert allocator.num_free == 0
    growth = allocator.grow([table], [1], [5])
    assert (table.first, table.length, len(table.blocks)) == (1, 13, 3)
    assert growth.changed == [(0, 2)]
    allocator.check([table])
    allocator.undo(growth)
    assert (table.first, table.length, len(table.blocks)) == (1, 12, 2)
    allocator.check([table])
    with pytest.raises(ValueError, match="cannot truncate"):
        allocator.truncate(table, 4)
    allocator.truncate(table, 5)
    allocator.release(table)
    assert table.first == 0 and allocator.num_free == 3


def test_a_growth_that_fails_gives_back_what_had_left() -> None:
    allocator = BlockAllocator(4, 4)
    table, other = BlockTable(), BlockTable()
    allocator.grow([table, other], [12, 4])
    twin = allocator.fork(table)
    before = list(table.blocks)
    with pytest.raises(OutOfBlocksError):
        allocator.grow([table, other], [9, 9], [8, 4])
    assert table.blocks == before == twin.blocks and table.first == 0 == other.first
    allocator.check([table, other, twin])


def test_a_row_that_does_not_grow_keeps_its_blocks() -> None:
    allocator = BlockAllocator(8, 4)
    tables = [BlockTable(), BlockTable()]
    allocator.grow(tables, [12, 12])
    allocator.grow(tables, [0, 1], [8, 8])
    assert [table.first for table in tables] == [0, 2]
    allocator.check(tables)
