"""The pool: its budget, its tensors, what several caches share of it, and that nothing holds it longer than they do."""

import contextlib
import gc
import logging
import math
import weakref

import pytest
import torch
from helpers import build_model, check_books, forward, generate, logits_alone, random_prompts, tiny_model

from hf_paged import BlockPool, OutOfBlocksError, PagedCache, paged_attention
from hf_paged import pool as pool_module
from hf_paged.pool import LayerGroup
from hf_paged.storage import LayerStorage

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, HEADS, DIM, SIZE = 2, 2, 16, 4
"""KV heads and head dim of the tiny models, and the block size of these tests."""
BLOCK_BYTES = LAYERS * 2 * HEADS * SIZE * DIM * 4
"""One block of float32 keys and values over both layers: 2,048 bytes, 512 for each token."""

GROUPS = (LayerGroup("full_attention", None, (0, 1)),)


def config():
    return tiny_model("llama").config


def kv(rows, tokens, heads=HEADS, dim=DIM, dtype=torch.float32):
    return torch.randn(rows, heads, tokens, dim).to(dtype), torch.randn(rows, heads, tokens, dim).to(dtype)


def feed(cache, rows, tokens, **kinds):
    """Store random keys and values in every layer; returns the keys that layer 0 gave back."""
    keys = [cache.update(*kv(rows, tokens, **kinds), layer)[0] for layer in range(len(cache.layers))]
    return keys[0]


# The budget ----------------------------------------------------------------------------------------------------------


def test_num_blocks_is_the_number_of_blocks_at_once():
    cache = PagedCache(config(), block_size=SIZE, num_blocks=7)
    stats = cache.stats()
    assert (stats.total_blocks, stats.free_blocks, stats.reserved_bytes) == (7, 7, 0)
    feed(cache, 1, 1)
    assert cache.stats().total_blocks == 7 and cache.stats().reserved_bytes == 7 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("max_memory", "blocks"),
    [
        (10 * BLOCK_BYTES, 10),
        (10 * BLOCK_BYTES + BLOCK_BYTES - 1, 10),
        (BLOCK_BYTES, 1),
        ("1MiB", 2**20 // BLOCK_BYTES),
        ("64KiB", 2**16 // BLOCK_BYTES),
        ("1MB", 10**6 // BLOCK_BYTES),
        (0.25, 25),
        (1.0, 100),
        (None, 50),
    ],
)
def test_max_memory_covers_the_keys_and_values_of_all_layers(monkeypatch, max_memory, blocks):
    monkeypatch.setattr(pool_module, "free_memory", lambda device: 100 * BLOCK_BYTES)
    cache = PagedCache(config(), block_size=SIZE, max_memory=max_memory)
    assert cache.stats().total_blocks == 0 and not cache.pool.is_sized
    feed(cache, 1, 1)
    assert cache.stats().total_blocks == blocks
    assert cache.stats().reserved_bytes == blocks * BLOCK_BYTES


def test_the_default_is_half_of_the_memory_that_the_system_calls_available(monkeypatch):
    class Memory:
        available = 1001 * BLOCK_BYTES

    monkeypatch.setattr(pool_module.psutil, "virtual_memory", Memory)
    cache = PagedCache(config(), block_size=SIZE)
    feed(cache, 1, 1)
    assert cache.stats().total_blocks == 500


@pytest.mark.parametrize("make", [BlockPool, lambda **budget: PagedCache(config(), **budget)])
def test_two_budgets_at_once_are_refused(make):
    with pytest.raises(ValueError, match="num_blocks or max_memory, not both"):
        make(num_blocks=4, max_memory="1GiB")


@pytest.mark.parametrize(
    "max_memory", ["much", "", "GiB", "-4GiB", "4 apples", 0, -1, 0.0, -0.5, 1.5, math.nan, math.inf, True, False, [1]]
)
def test_a_max_memory_that_makes_no_sense_is_refused_at_once(max_memory):
    with pytest.raises(ValueError, match="max_memory") as caught:
        BlockPool(max_memory=max_memory)
    assert repr(max_memory) in str(caught.value)


@pytest.mark.parametrize("num_blocks", [0, -3, True, 2.5, "8"])
def test_a_num_blocks_that_makes_no_sense_is_refused_at_once(num_blocks):
    with pytest.raises(ValueError, match="num_blocks must be an integer of at least 1"):
        BlockPool(num_blocks=num_blocks)


@pytest.mark.parametrize("block_size", [0, 3, 512, True, 16.0])
def test_a_block_size_that_makes_no_sense_is_refused_at_once(block_size):
    with pytest.raises(ValueError, match="block_size must be a power of two"):
        PagedCache(config(), block_size=block_size)


def test_a_budget_that_holds_no_block_is_refused_with_the_size_of_one():
    cache = PagedCache(config(), block_size=SIZE, max_memory=BLOCK_BYTES - 1)
    with pytest.raises(ValueError, match=rf"holds no block.*{BLOCK_BYTES:,} bytes over 2 layers"):
        feed(cache, 1, 1)
    assert not cache.pool.is_sized and not cache.pool.storages and cache.get_seq_length() == 0


def test_a_pool_that_cannot_be_reserved_says_how_large_it_would_have_been():
    pool = BlockPool(block_size=16, num_blocks=2**27 - 1)
    pool.bind(GROUPS)
    wide = torch.zeros(1, 64, 1, 256, dtype=torch.float64)
    with pytest.raises(MemoryError, match=r"cannot reserve 134,217,727 blocks .*smaller num_blocks or max_memory"):
        pool.storage(0, wide, wide)
    assert not pool.storages


@pytest.mark.parametrize("arguments", [{"num_blocks": 4}, {"max_memory": "1GiB"}, {"block_size": 8}])
def test_a_budget_beside_a_pool_is_refused(arguments):
    with pytest.raises(ValueError, match="belong to the pool"):
        PagedCache(config(), pool=BlockPool(block_size=SIZE), **arguments)


def test_the_pool_says_once_in_the_log_what_it_reserved(caplog):
    cache = PagedCache(config(), block_size=SIZE, num_blocks=1000)
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        assert not caplog.records
        feed(cache, 1, 1)
        feed(cache, 1, 1)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "hf_paged"]
    for part in ("on cpu", "1,000 blocks of 4 tokens", "4,000 tokens", "2,048,000 bytes", "2 layers"):
        assert part in line
    assert "committed as they are written" in line


# The tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_tensors_are_made_when_a_layer_first_stores_something_and_fit_it(dtype):
    pool = BlockPool(block_size=SIZE, num_blocks=6)
    cache = PagedCache(config(), pool=pool)
    assert not pool.storages and pool.reserved_bytes == 0 and not cache.is_initialized
    cache.update(*kv(2, 3, dtype=dtype), 0)
    assert list(pool.storages) == [0]
    storage = pool.storages[0]
    assert storage.kv.shape == (6, 2, HEADS, SIZE, DIM)
    assert storage.key_blocks.shape == storage.value_blocks.shape == (6, HEADS, SIZE, DIM)
    assert storage.kv.dtype == dtype and storage.device == torch.device("cpu")
    assert storage.key_blocks.data_ptr() == storage.kv.data_ptr()  # a view
    assert storage.bytes_per_block == 2 * HEADS * SIZE * DIM * dtype.itemsize
    cache.update(*kv(2, 3, dtype=dtype), 1)
    assert sorted(pool.storages) == [0, 1] and cache.is_initialized
    assert pool.reserved_bytes == 2 * storage.kv.nbytes


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "key_dtype", "value_dtype"),
    [
        (16, 8, torch.float32, torch.float32),
        (16, 16, torch.bfloat16, torch.float32),
        (16, 16, torch.float32, torch.bfloat16),
    ],
)
def test_keys_and_values_that_differ_get_tensors_of_their_own(key_dim, value_dim, key_dtype, value_dtype):
    cache = PagedCache(config(), block_size=SIZE, num_blocks=6)
    key, value = kv(2, 5, dim=key_dim, dtype=key_dtype)[0], kv(2, 5, dim=value_dim, dtype=value_dtype)[1]
    for layer in range(2):
        cache.update(key, value, layer)
    storage = cache.pool.storages[0]
    assert storage.kv is None
    assert (storage.key_blocks.shape, storage.key_blocks.dtype) == ((6, HEADS, SIZE, key_dim), key_dtype)
    assert (storage.value_blocks.shape, storage.value_blocks.dtype) == ((6, HEADS, SIZE, value_dim), value_dtype)
    per_block = HEADS * SIZE * (key_dim * key_dtype.itemsize + value_dim * value_dtype.itemsize)
    assert storage.bytes_per_block == per_block
    assert cache.stats().reserved_bytes == 2 * 6 * per_block
    keys, values = cache.update(key[:, :, :1], value[:, :, :1], 0)
    assert torch.equal(keys, torch.cat((key, key[:, :, :1]), 2)) and keys.dtype == key_dtype
    assert torch.equal(values, torch.cat((value, value[:, :, :1]), 2)) and values.dtype == value_dtype


def test_a_storage_made_under_inference_mode_can_be_written_outside_it():
    with torch.inference_mode():
        storage = LayerStorage(2, SIZE, HEADS, DIM, 8, torch.float32, torch.float32, torch.device("cpu"))
    assert not storage.key_blocks.is_inference() and not storage.value_blocks.is_inference()
    storage.key_blocks.zero_()


# A model that does not fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other", [{"heads": 4}, {"dim": 8}, {"dtype": torch.bfloat16}], ids=["heads", "head dim", "dtype"]
)
def test_other_heads_widths_or_dtypes_on_one_pool_are_refused_and_change_nothing(other):
    pool = BlockPool(block_size=SIZE, num_blocks=8)
    cache = PagedCache(config(), pool=pool)
    before = feed(cache, 2, 5)
    wrong = PagedCache(config(), pool=pool)
    stats, tables = cache.stats(), cache.block_tables
    for refusing, rows in ((wrong, 3), (cache, 2)):
        with pytest.raises(
            ValueError, match=r"the blocks of layer 0 were made for 2 KV heads of 16/16 in float32/float32 on cpu"
        ):
            refusing.update(*kv(rows, 4, **other), 0)
        assert cache.stats() == stats and cache.block_tables == tables
    assert wrong.get_seq_length() == 0 and wrong.batch_size == -1
    check_books(cache)
    after = feed(cache, 2, 1)
    assert torch.equal(after[:, :, :5], before)
    feed(wrong, 1, 2)  # the right kind is served


@pytest.mark.parametrize("family", ["gemma2", "mistral", "three layers"])
def test_a_model_with_other_layers_on_one_pool_is_refused_by_name_and_changes_nothing(family):
    pool = BlockPool(block_size=SIZE, num_blocks=8)
    cache = PagedCache(config(), pool=pool)
    feed(cache, 2, 5)
    stats, groups = cache.stats(), pool.groups
    if family == "three layers":
        other, described = build_model("llama", num_hidden_layers=3).config, "3 layers of full_attention"
    else:
        other, described = tiny_model(family).config, r"sliding_attention\(8\)"
    with pytest.raises(ValueError, match=rf"made for a model with 2 layers of full_attention.*{described}"):
        PagedCache(other, pool=pool)
    assert (cache.stats(), pool.groups) == (stats, groups)
    feed(cache, 2, 1)


# What is counted -----------------------------------------------------------------------------------------------------


def test_reserved_in_use_and_tokens_are_told_apart():
    cache = PagedCache(config(), block_size=SIZE, num_blocks=10)
    feed(cache, 2, 6)  # two rows of two blocks, the second half full
    assert cache.stats().as_dict() == {
        "block_size": 4,
        "total_blocks": 10,
        "used_blocks": 4,
        "free_blocks": 6,
        "shared_blocks": 0,
        "peak_blocks": 4,
        "tokens": 12,
        "reserved_bytes": 20_480,
        "used_bytes": 8_192,
        "peak_bytes": 8_192,
        "token_bytes": 6_144,
        "waste": 0.25,
    }
    cache.crop(-3)  # one block each, three quarters full
    stats = cache.stats()
    assert (stats.used_blocks, stats.peak_blocks, stats.tokens) == (2, 4, 6)
    assert (stats.reserved_bytes, stats.used_bytes, stats.peak_bytes) == (20_480, 4_096, 8_192)
    assert (stats.token_bytes, stats.waste) == (3_072, 0.25)
    cache.reset()
    stats = cache.stats()
    assert (stats.used_blocks, stats.tokens, stats.token_bytes, stats.waste, stats.free_blocks) == (0, 0, 0, 0.0, 10)
    assert stats.reserved_bytes == 20_480


def test_shared_blocks_are_counted_once_in_bytes_and_for_each_row_in_tokens():
    cache = PagedCache(config(), block_size=SIZE, num_blocks=10)
    feed(cache, 2, 6)
    twin = cache.fork()
    for side in (cache, twin):
        stats = side.stats()
        assert (stats.used_blocks, stats.shared_blocks, stats.tokens) == (4, 4, 12)
        assert (stats.used_bytes, stats.token_bytes, stats.waste) == (8_192, 6_144, 0.25)
    feed(twin, 2, 1)  # both rows copy their half full block: the two full ones stay shared
    stats, other = twin.stats(), cache.stats()
    assert (stats.used_blocks, stats.shared_blocks, stats.tokens, stats.waste) == (6, 2, 14, 0.125)
    assert (stats.token_bytes, other.token_bytes) == (14 * 512, 12 * 512)
    assert (other.used_blocks, other.shared_blocks, other.tokens, other.waste) == (6, 2, 12, 0.25)
    cache.batch_repeat_interleave(3)
    stats = cache.stats()
    assert (stats.used_blocks, stats.shared_blocks, stats.tokens, stats.token_bytes) == (6, 4, 36, 6_144)


def test_a_model_with_two_kinds_of_layers_counts_the_blocks_of_both():
    cache = PagedCache(tiny_model("gemma2").config, block_size=SIZE, num_blocks=10)
    feed(cache, 1, 6)
    stats = cache.stats()
    assert (stats.total_blocks, stats.used_blocks, stats.free_blocks, stats.tokens) == (20, 4, 16, 6)
    assert (stats.reserved_bytes, stats.used_bytes, stats.token_bytes) == (20_480, 4_096, 3_072)
    assert stats.waste == 0.25


# One pool, several caches --------------------------------------------------------------------------------------------


def test_two_caches_on_one_pool_hold_blocks_of_their_own_and_give_them_back():
    pool = BlockPool(block_size=SIZE, num_blocks=10)
    first, second = PagedCache(config(), pool=pool), PagedCache(config(), pool=pool)
    assert first.pool is second.pool is pool
    one, two = feed(first, 2, 6), feed(second, 1, 9)
    blocks = [{b for row in cache.block_tables["full_attention"] for b in row} for cache in (first, second)]
    assert [len(b) for b in blocks] == [4, 3] and not blocks[0] & blocks[1]
    assert first.stats().used_blocks == second.stats().used_blocks == 7
    assert (first.stats().tokens, second.stats().tokens) == (12, 9)
    assert torch.equal(first.layers[0].keys, one) and torch.equal(second.layers[0].keys, two)
    assert pool.reserved_bytes == 10 * BLOCK_BYTES  # one set of tensors
    with pytest.raises(OutOfBlocksError):
        feed(second, 1, 16)
    del first
    assert second.stats().used_blocks == 3
    assert torch.equal(feed(second, 1, 16)[:, :, :9], two)
    check_books(second)
    del second
    assert pool.allocators[0].num_used == 0 and pool.storages  # the pool outlives its caches


def test_a_second_cache_on_a_pool_continues_the_blocks_of_none():
    pool = BlockPool(block_size=SIZE, num_blocks=4)
    for _ in range(20):
        cache = PagedCache(config(), pool=pool)
        stored = feed(cache, 1, 13)
        assert torch.equal(cache.layers[0].keys, stored)
        assert cache.block_tables == {"full_attention": [[0, 1, 2, 3]]}
        del cache


# Nothing else holds a pool -------------------------------------------------------------------------------------------


def _updates(model):
    cache = PagedCache(model.config, block_size=SIZE, num_blocks=16)
    feed(cache, 2, 6)
    return cache


def _handed_out_tensors(model):
    cache = _updates(model)
    kept.extend(cache.update(*kv(2, 1), 0))
    return cache


def _generate(model, **options):
    cache = PagedCache(model.config, block_size=SIZE, num_blocks=64)
    generate(model, *random_prompts([5, 9]), cache=cache, **({"max_new_tokens": 5} | options))
    return cache


def _enabled_generate(model, **options):
    with paged_attention(model):
        return _generate(model, **options)


def _failing_generate(model):
    cache = PagedCache(model.config, block_size=SIZE, num_blocks=6)
    with contextlib.suppress(OutOfBlocksError):
        generate(model, *random_prompts([5, 9]), cache=cache)
        raise AssertionError("it did not fail")
    assert cache.stats().used_blocks >= 5
    return cache


def _enabled_failing_generate(model):
    with paged_attention(model):
        return _failing_generate(model)


class _Broken(Exception):
    pass


def _break(*args):
    raise _Broken


def _enabled_broken_layer(model):
    cache = _enabled_generate(model)
    hook = model.model.layers[1].register_forward_hook(_break)
    cache._rows.origin.ids = None  # whatever it holds
    with paged_attention(model), pytest.raises(_Broken):
        generate(model, *random_prompts([5, 9 + 5 + 1]), cache=cache)
    hook.remove()
    return cache


def _enabled_grad(model):
    cache = PagedCache(model.config, block_size=SIZE, num_blocks=64)
    with paged_attention(model), torch.enable_grad():
        ids, _ = random_prompts([6])
        forward(model, ids, cache)
        forward(model, ids, cache)
    return cache


def _fork(model):
    cache = _enabled_generate(model)
    twin = cache.fork([1, 1])
    cache.fork()
    del cache
    return twin


kept = []  # what a user might keep


@pytest.mark.parametrize(
    "use",
    [
        _updates,
        _handed_out_tensors,
        _generate,
        _enabled_generate,
        lambda model: _enabled_generate(model, num_beams=3),
        lambda model: _enabled_generate(model, eos_token_id=list(range(1, 60))),
        lambda model: _enabled_generate(model, return_dict_in_generate=True, output_scores=True),
        _failing_generate,
        _enabled_failing_generate,
        _enabled_broken_layer,
        _enabled_grad,
        _fork,
    ],
    ids=[
        "updates",
        "tensors kept",
        "generate",
        "enabled",
        "enabled with beams",
        "enabled with rows that end",
        "enabled with outputs",
        "out of blocks",
        "enabled and out of blocks",
        "enabled and a layer raised",
        "enabled with gradients",
        "forks",
    ],
)
def test_a_pool_goes_with_its_last_cache_at_once_while_the_model_lives(use):
    model = build_model("llama")
    gc.collect()
    gc.disable()
    try:
        cache = use(model)
        storage = cache.pool.storages[1]
        watched = {
            "cache": weakref.ref(cache),
            "pool": weakref.ref(cache.pool),
            "storage": weakref.ref(storage),
            "tensor": weakref.ref(storage.kv),
        }
        del storage
        assert all(ref() is not None for ref in watched.values())
        del cache
        assert [name for name, ref in watched.items() if ref() is not None] == []
    finally:
        gc.enable()
        kept.clear()


def test_a_pool_that_is_kept_outlives_its_caches_and_goes_with_them():
    gc.collect()
    gc.disable()
    try:
        pool = BlockPool(block_size=SIZE, num_blocks=8)
        cache = PagedCache(config(), pool=pool)
        feed(cache, 1, 3)
        watched = weakref.ref(pool)
        del pool
        assert watched() is not None
        del cache
        assert watched() is None
    finally:
        gc.enable()


# Autograd modes ------------------------------------------------------------------------------------------------------

MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("enabled", [False, True], ids=["plain", "enabled"])
@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("first", MODES)
def test_a_pool_made_under_one_autograd_mode_works_under_another(first, second, enabled):
    model = build_model("llama")
    (ids,) = random_prompts([14])[:1]
    expected = logits_alone(model, ids[0])
    cache = PagedCache(model.config, block_size=SIZE, num_blocks=16)

    def step(cache, mode, start, end):
        with MODES[mode]():
            logits = forward(model, ids[:, start:end], cache).logits[0]
        torch.testing.assert_close(logits.detach(), expected[start:end], atol=2e-4, rtol=1e-4)

    with paged_attention(model) if enabled else contextlib.nullcontext():
        step(cache, first, 0, 6)
        step(cache, second, 6, 9)
        with MODES[second]():
            twin = cache.fork()
        step(twin, first, 9, 10)  # copies a block
        step(cache, second, 9, 10)
        cache.crop(-3)
        step(cache, first, 7, 11)
        step(twin, second, 10, 14)
    for side in (cache, twin):
        assert not any(t.is_inference() for s in side.pool.storages.values() for t in (s.key_blocks, s.value_blocks))


def test_a_cache_that_dies_while_the_pool_is_busy_gives_its_blocks_back_at_the_end():
    """As when the garbage collector finds it in the middle of an allocation."""
    config = tiny_model("llama").config
    pool = BlockPool(num_blocks=16)
    keeper, gone = PagedCache(config, pool=pool), PagedCache(config, pool=pool)
    key = torch.zeros(1, 2, 5, 16)
    keeper.update(key, key, 0)
    gone.update(key, key, 0)
    (allocator,) = pool.allocators
    with pool.lock:
        del gone
        assert allocator.num_used == 2
    assert allocator.num_used == 1
    allocator.check(table for tables in keeper._rows.tables for table in tables)


def test_what_was_given_back_after_the_last_look_is_released_by_the_next_to_take_the_lock():
    model = tiny_model("llama")
    cache = PagedCache(model.config, num_blocks=4)
    pool = cache.pool
    feed(cache, 1, 20)
    pool.lock.take_if_free = lambda: False  # somebody has it still, and has looked already
    cache._rows.__del__()
    cache._rows.tables = []
    del pool.lock.take_if_free
    assert pool.allocators[0].num_used == 2
    with pool.lock:
        assert pool.allocators[0].num_used == 0


def test_blocks_of_a_cache_in_a_reference_cycle_are_found_when_they_are_needed():
    """As when an exception's traceback holds the variables of generate()."""
    model = tiny_model("llama")
    pool = BlockPool(num_blocks=2)
    collecting = gc.isenabled()
    gc.disable()
    try:
        lost = PagedCache(model.config, pool=pool)
        feed(lost, 1, 20)
        lost.itself = lost
        del lost
        assert pool.allocators[0].num_used == 2
        cache = PagedCache(model.config, pool=pool)
        feed(cache, 1, 17)
        assert cache.stats().used_blocks == 2
        check_books(cache)
        with pytest.raises(OutOfBlocksError, match="only 0 of 2 are free"):
            feed(PagedCache(model.config, pool=pool), 1, 1)
    finally:
        if collecting:
            gc.enable()


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_memory_that_torch_has_cached_is_free(monkeypatch, kind):
    device = getattr(torch, kind)
    monkeypatch.setattr(device, "mem_get_info", lambda device: (1000, 5000), raising=False)
    monkeypatch.setattr(device, "memory_reserved", lambda device: 3000, raising=False)
    monkeypatch.setattr(device, "memory_allocated", lambda device: 800, raising=False)
    assert pool_module.free_memory(torch.device(kind, 0)) == 3200


def test_a_prompt_that_is_kept_is_shared_with_nobody():
    model = tiny_model("llama")
    ids, mask = random_prompts((37,))
    pool = BlockPool(num_blocks=64, prefix_cache=True)
    with paged_attention(model):
        first, second = (PagedCache(model.config, pool=pool) for _ in range(2))
        generate(model, ids, mask, first, max_new_tokens=4)
        assert len(pool.prefixes) and first.stats().shared_blocks == 0
        generate(model, ids, mask, second, max_new_tokens=4)
    assert first.stats().shared_blocks == second.stats().shared_blocks == 2


def test_a_pool_says_how_large_it_will_be():
    assert repr(BlockPool(num_blocks=4)) == "BlockPool(blocks=0 of 4, block_size=16)"


def test_more_blocks_than_kernels_can_count_are_refused():
    most = (2**31 - 1) // 16
    assert repr(BlockPool(num_blocks=most))
    with pytest.raises(ValueError, match=f"num_blocks must be at most {most:,}"):
        BlockPool(num_blocks=most + 1)
