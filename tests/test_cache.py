"""PagedCache as transformers' `Cache`: every call of the interface against a DynamicCache that was fed the same.

A PagedCache keeps all tokens of windowed layers too, so the DynamicCache beside it is one without windows. What a model
makes of the cache is compared with the model's own answer to the whole row, without any cache.
"""

import copy
import pickle

import pytest
import torch
import transformers
from helpers import (
    WAYS,
    assert_unchanged,
    blocks_of,
    check_books,
    forward,
    logits_alone,
    random_prompts,
    run_way,
    snapshot,
    tiny_model,
)
from packaging.version import Version
from transformers import DynamicCache

from hf_paged import PagedCache, paged_attention
from hf_paged.pictures import text_map

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, DIM, SIZE = 2, 16, 4
FAMILIES = ["llama", "gemma2"]  # one kind of layers; windows of 8 and full attention in turn
CROPS_TO_A_LENGTH = Version(transformers.__version__) < Version("5.18")
FULL = "full_attention"


def make_cache(family="llama", block_size=SIZE, num_blocks=64, **arguments):
    return PagedCache(tiny_model(family).config, block_size=block_size, num_blocks=num_blocks, **arguments)


class Pair:
    """A PagedCache, and a DynamicCache that is fed the same and asked the same. The latter knows no windows, so that
    all positions can be compared; what is outside a layer's window is left out where transformers would."""

    def __init__(self, family="llama", rows=0, tokens=0, **arguments):
        self.paged, self.dynamic = make_cache(family, **arguments), DynamicCache()
        self.generator = torch.Generator().manual_seed(0)
        if rows:
            self.feed(rows, tokens)

    def feed(self, rows, tokens):
        """The same random tokens for both; what `update` returns must agree."""
        for layer in range(len(self.paged.layers)):
            key, value = torch.randn(2, rows, HEADS, tokens, DIM, generator=self.generator).unbind()
            first = self.outside_window(layer)
            new, expected = (cache.update(key.clone(), value.clone(), layer) for cache in (self.paged, self.dynamic))
            for one, other in zip(new, expected, strict=True):
                assert torch.equal(one, other[:, :, first:])
        self.agree()

    def outside_window(self, layer):
        window = self.paged.layers[layer].window
        return 0 if window is None else max(self.paged.get_seq_length(layer) - window + 1, 0)

    def same(self, layer, *pairs):
        """What is held is equal, and what has left a window is zero."""
        table = self.paged._rows.tables[self.paged.layers[layer].group][0]
        left = table.first * self.paged.block_size
        for ours, theirs in pairs:
            assert torch.equal(ours[:, :, left:], theirs[:, :, left:]) and not ours[:, :, :left].any()

    def both(self, name, *args):
        for cache in (self.paged, self.dynamic):
            getattr(cache, name)(*args)

    def agree(self):
        length = self.dynamic.get_seq_length()
        for index, layer in enumerate(self.paged.layers):
            assert self.paged.get_seq_length(index) == self.dynamic.get_seq_length(index) == length
            for queries in (1, 3):
                first = self.outside_window(index)
                assert self.paged.get_mask_sizes(queries, index) == (length - first + queries, first)
            if length:
                expected = self.dynamic.layers[index]
                self.same(index, (layer.keys, expected.keys), (layer.values, expected.values))
            else:
                assert layer.keys is None and layer.values is None
        if length:
            rows = len(self.dynamic.layers[0].keys)
            assert self.paged.batch_size == rows and self.paged.row_lengths == [length] * rows

    def agree_and_go_on(self, rows):
        """Agree now, and after more tokens, first a few and then one: tables must be right to write through."""
        self.agree()
        check_books(self.paged)
        self.feed(rows, 3)
        self.feed(rows, 1)
        check_books(self.paged)


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


# Storing and lengths -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("steps", [(1, 1, 1, 1, 1, 1), (9, 1, 1), (3, 5, 8, 1), (16, 1), (33,)])
def test_update_returns_what_a_dynamic_cache_returns(family, block_size, steps):
    pair = Pair(family, block_size=block_size, num_blocks=128)
    for tokens in steps:
        pair.feed(3, tokens)
    lengths = [sum(steps)] * 3
    assert pair.paged.stats().used_blocks == blocks_of(pair.paged, lengths, steps[-1])
    check_books(pair.paged)


def test_keys_and_values_of_any_strides_are_stored():
    cache = make_cache()
    key = torch.randn(2, 5, HEADS, DIM).transpose(1, 2)
    value = torch.randn(2, HEADS, DIM, 5).transpose(2, 3)
    expanded = key[:, :1, :1].expand(2, HEADS, 5, DIM)
    cache.update(key, value, 0)
    cache.update(expanded, value.flip(0), 1)
    assert torch.equal(cache.layers[0].keys, key) and torch.equal(cache.layers[0].values, value)
    assert torch.equal(cache.layers[1].keys, expanded) and torch.equal(cache.layers[1].values, value.flip(0))


def test_what_update_was_given_may_be_overwritten_afterwards():
    cache = make_cache()
    key, value = torch.randn(2, 2, HEADS, 5, DIM)
    expected = key.clone()
    cache.update(key, value, 0)
    key.zero_()
    assert torch.equal(cache.layers[0].keys, expected)


def test_what_update_returns_is_contiguous(family):
    cache = make_cache(family)
    for tokens in (9, 1, 2):
        for layer in range(len(cache.layers)):
            key, value = torch.randn(2, 3, HEADS, tokens, DIM)
            for dense in cache.update(key, value, layer):
                assert dense.is_contiguous()


def test_an_empty_cache_has_lengths_of_zero(family):
    cache = make_cache(family)
    assert (cache.get_seq_length(), cache.batch_size, cache.is_initialized) == (0, -1, False)
    assert cache.get_mask_sizes(7, 0) == cache.get_mask_sizes(7, 1) == (7, 0)
    assert [list(item[:2]) for item in cache] == [[None, None], [None, None]]


def test_facts_about_layers_are_those_of_a_dynamic_cache(family):
    config = tiny_model(family).config
    paged, dynamic = make_cache(family), DynamicCache(config=config)
    assert len(paged) == len(dynamic) == len(paged.layers) == 2
    assert paged.is_sliding == dynamic.is_sliding == ([True, False] if family == "gemma2" else [False, False])
    assert paged.get_max_length() == dynamic.get_max_length()
    assert [paged.get_max_length(i) for i in range(2)] == [dynamic.get_max_length(i) for i in range(2)]
    assert paged.is_croppable and dynamic.is_croppable
    assert paged.is_compileable == dynamic.is_compileable
    assert paged.get_max_length(99) == dynamic.get_max_length(99) == -1


def test_iterating_gives_keys_values_and_window_of_each_layer(family):
    pair = Pair(family, 2, 5)
    windows = [item[2] for item in DynamicCache(config=tiny_model(family).config)]
    items = list(pair.paged)
    assert len(items) == 2
    for (keys, values, window), expected, expected_window in zip(items, pair.dynamic, windows, strict=True):
        assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])
        assert (window is None and expected_window is None) or torch.equal(window, expected_window)


def test_early_initialization_makes_the_tensors_and_stores_nothing(family):
    pair = Pair(family)
    pair.paged.early_initialization(2, HEADS, DIM, torch.float32, torch.device("cpu"))
    assert pair.paged.is_initialized and sorted(pair.paged.pool.storages) == [0, 1]
    assert (pair.paged.get_seq_length(), pair.paged.stats().used_blocks, pair.paged.batch_size) == (0, 0, -1)
    pair.agree_and_go_on(2)


def test_a_layer_that_the_cache_was_not_made_for_is_refused():
    cache = make_cache()
    key = torch.zeros(1, HEADS, 1, DIM)
    with pytest.raises(ValueError, match="layer 2 was updated, but this cache was made for 2 layers"):
        cache.update(key, key, 2)
    assert cache.stats().used_blocks == 0


def test_another_number_of_rows_is_refused_and_changes_nothing(family):
    pair = Pair(family, 2, 5)
    before = snapshot(pair.paged)
    key = torch.zeros(3, HEADS, 1, DIM)
    with pytest.raises(ValueError, match=r"holds 2 rows, but the batch has 3.*cache\.reset\(\)"):
        pair.paged.update(key, key, 0)
    assert_unchanged(pair.paged, before)
    pair.agree_and_go_on(2)


def test_use_cache_false_beside_a_cache_is_refused():
    key = torch.zeros(1, HEADS, 1, DIM)
    with pytest.raises(ValueError, match="use_cache=False"):
        make_cache().update(key, key, 0, kwargs={"use_cache": False})


def test_gradients_may_be_enabled_but_a_backward_pass_is_refused():
    cache = make_cache()
    key = torch.randn(1, HEADS, 3, DIM, requires_grad=True)
    for _ in range(2):
        keys, values = cache.update(key, key * 2, 0)
    assert keys.requires_grad and torch.equal(keys.detach(), torch.cat((key, key), 2).detach())
    with pytest.raises(NotImplementedError, match="backward pass"):
        (keys.sum() + values.sum()).backward()
    assert key.grad is None


# Changing what is held -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, -1, -2, -5, -9, -12, -13])
def test_crop_removes_tokens_as_a_dynamic_cache_does(family, tokens):
    pair = Pair(family, 2, 9)
    pair.feed(2, 4)
    pair.paged.activate_past_recording()
    pair.both("crop", tokens)
    left = 13 + tokens
    assert pair.paged.stats().used_blocks == len(pair.paged.block_tables) * 2 * -(-left // SIZE)
    pair.agree_and_go_on(2)


def test_cropping_more_than_there_is_empties_the_cache(family):
    pair = Pair(family, 2, 9)
    pair.paged.crop(-100)
    assert (pair.paged.get_seq_length(), pair.paged.stats().used_blocks) == (0, 0)
    pair.dynamic = DynamicCache()
    pair.agree_and_go_on(3)


@pytest.mark.parametrize("length", [1, 4, 6, 9, 10, 50])
def test_crop_with_a_positive_number_does_what_this_version_of_transformers_does(family, length):
    pair = Pair(family, 2, 9)
    if CROPS_TO_A_LENGTH:
        pair.both("crop", length)
        assert pair.paged.get_seq_length() == min(length, 9)
    else:
        before = snapshot(pair.paged)
        for cache in (pair.paged, pair.dynamic):
            with pytest.raises(ValueError, match=f"{length}.*negative"):
                cache.crop(length)
        assert_unchanged(pair.paged, before)
    pair.agree_and_go_on(2)


def test_cropping_an_empty_cache_does_nothing(family):
    pair = Pair(family)
    pair.both("crop", -2)
    pair.agree_and_go_on(2)


def test_reset_gives_every_block_back_and_other_rows_may_follow(family):
    pair = Pair(family, 2, 9)
    pair.paged.reset()
    pair.dynamic = DynamicCache()  # whose own reset() kept zeros for the tokens up to transformers 5.17
    assert (pair.paged.get_seq_length(), pair.paged.batch_size, pair.paged.stats().used_blocks) == (0, -1, 0)
    pair.agree_and_go_on(3)


@pytest.mark.parametrize("order", [[2, 0, 1], [1, 1, 0], [2, 2, 2], [0, 1, 2]])
def test_reordering_moves_tables_and_no_tokens(family, order):
    pair = Pair(family, 3, 6)
    before = pair.paged.block_tables
    pair.both("reorder_cache", torch.tensor(order))
    for name, tables in pair.paged.block_tables.items():
        assert tables == [before[name][row] for row in order]
    assert pair.paged.stats().used_blocks == len(before) * 2 * len(set(order))
    pair.agree_and_go_on(3)


def test_beams_that_part_from_one_row_copy_only_its_last_block(family):
    pair = Pair(family, 3, 6)
    pair.both("reorder_cache", torch.tensor([1, 1, 1]))
    pair.feed(3, 1)
    for tables in pair.paged.block_tables.values():
        assert len({row[0] for row in tables}) == 1 and len({row[1] for row in tables}) == 3
    pair.both("reorder_cache", torch.tensor([2, 0, 0]))
    pair.agree_and_go_on(3)


@pytest.mark.parametrize("repeats", [1, 3])
def test_repeating_rows_shares_their_blocks(family, repeats):
    pair = Pair(family, 2, 6)
    used = pair.paged.stats().used_blocks
    pair.both("batch_repeat_interleave", repeats)
    assert pair.paged.stats().used_blocks == used
    pair.agree_and_go_on(2 * repeats)


@pytest.mark.parametrize(
    "indices",
    [torch.tensor([2, 0]), torch.tensor([1]), torch.tensor([-1, 1]), torch.tensor([True, False, True]), [2, 0]],
    ids=["indices", "one index", "negative", "bool", "list"],
)
def test_selecting_rows_frees_the_blocks_of_the_others(family, indices):
    pair = Pair(family, 3, 6)
    pair.both("batch_select_indices", indices)
    rows = len(pair.dynamic.layers[0].keys)
    assert pair.paged.stats().used_blocks == len(pair.paged.block_tables) * 2 * rows
    pair.agree_and_go_on(rows)


@pytest.mark.parametrize("indices", [[0, 3], [-4]])
def test_selecting_a_row_that_is_not_there_is_refused_and_changes_nothing(indices):
    pair = Pair("llama", 3, 6)
    before = snapshot(pair.paged)
    for change in (pair.paged.reorder_cache, pair.paged.batch_select_indices):
        with pytest.raises(IndexError, match="cache of 3 rows"):
            change(torch.tensor(indices))
    with pytest.raises(IndexError, match="cache of 3 rows"):
        pair.paged.release(indices)
    assert_unchanged(pair.paged, before)
    pair.agree_and_go_on(3)


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("reorder_cache", torch.tensor([0, 0])),
        ("batch_repeat_interleave", 2),
        ("batch_select_indices", torch.tensor([0])),
        ("batch_select_indices", torch.tensor([True, False])),
        ("reset", None),
        ("activate_past_recording", None),
    ],
    ids=["reorder", "repeat", "select", "select by bool", "reset", "recording"],
)
def test_changing_the_rows_of_an_empty_cache_does_nothing_as_in_a_dynamic_cache(name, argument):
    pair = Pair()
    pair.dynamic = DynamicCache(config=tiny_model("llama").config)
    pair.both(name, *(() if argument is None else (argument,)))
    pair.agree_and_go_on(2)


def test_whole_cache_operations_are_not_offered_by_single_layers():
    layer = make_cache().layers[0]
    for name in ("reset", "crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices", "offload"):
        with pytest.raises(NotImplementedError, match="call this on the cache"):
            getattr(layer, name)(1)


# Copies that share ---------------------------------------------------------------------------------------------------


def check_shared_books(*caches):
    """Assert that the pool's books agree with the tables of these caches, all that there are on it."""
    for allocator, *tables in zip(caches[0].pool.allocators, *(cache._rows.tables for cache in caches), strict=True):
        allocator.check([table for rows in tables for table in rows])


def split(pair, twin):
    other = Pair.__new__(Pair)
    other.paged, other.dynamic = twin, copy.deepcopy(pair.dynamic)
    other.generator = torch.Generator().manual_seed(99)
    return other


@pytest.mark.parametrize("tokens", [6, 8, 11])
@pytest.mark.parametrize("copying", [copy.deepcopy, copy.copy, PagedCache.fork], ids=["deepcopy", "copy", "fork"])
def test_a_copy_shares_every_block_and_both_sides_go_on_with_tokens_of_their_own(family, copying, tokens):
    pair = Pair(family, 2, tokens)
    used, tensors = pair.paged.stats().used_blocks, list(pair.paged.pool.storages.values())
    twin = split(pair, copying(pair.paged))
    assert twin.paged is not pair.paged and twin.paged.pool is pair.paged.pool
    assert twin.paged.block_tables == pair.paged.block_tables
    assert pair.paged.stats().used_blocks == used and list(pair.paged.pool.storages.values()) == tensors
    for side in (twin, pair, twin, pair):
        side.feed(2, 1)
        twin.agree()
        pair.agree()
    pair.both("crop", -1)
    twin.feed(2, 5)
    pair.feed(2, 2)
    twin.agree()
    pair.agree()
    check_shared_books(pair.paged, twin.paged)
    del pair, side
    twin.agree_and_go_on(2)  # the only holder of the books now


@torch.no_grad()
def test_the_padding_and_releases_of_a_fork_are_its_own():
    model = tiny_model("llama")
    ids, _ = random_prompts([9, 9])
    cache = make_cache()
    with paged_attention(model):
        forward(model, ids[:, :6], cache)
        twin, third = cache.fork(), cache.fork()
        mask = torch.ones(2, 8, dtype=torch.long)
        mask[0, 6] = 0
        forward(model, ids[:, 6:8], twin, attention_mask=mask)
        forward(model, ids[:, 6:8], cache)
        third.release([1])
        assert (cache.row_lengths, twin.row_lengths, third.row_lengths) == ([8, 8], [7, 8], [6, 0])
        assert [[bool(k.any()) for k in row.keys[0, 0]] for row in (cache.layers[0], twin.layers[0])] == [
            [True] * 8,
            [True] * 6 + [False, True],
        ]
        assert cache.layers[0].keys[1].any() and not third.layers[0].keys[1].any()
        for side in (cache, twin):
            side.crop(-2)
            logits = forward(model, ids[:, 6:9], side).logits
            for row in range(2):
                torch.testing.assert_close(logits[row], logits_alone(model, ids[row])[6:], atol=2e-4, rtol=1e-4)
    check_shared_books(cache, twin, third)


def test_a_copy_of_an_empty_cache_is_an_empty_cache_on_the_same_pool(family):
    pair = Pair(family)
    twin = split(pair, copy.deepcopy(pair.paged))
    assert twin.paged.pool is pair.paged.pool and twin.paged.batch_size == -1
    pair.feed(2, 5)
    twin.feed(3, 6)
    pair.agree()


def test_deepcopying_a_structure_copies_the_cache_in_it_once():
    cache = Pair("llama", 1, 3).paged
    first, second = copy.deepcopy([cache, cache])
    assert first is second and first is not cache


@pytest.mark.parametrize("rows", [[1], [2, 0], [1, 1, 1]])
def test_forking_some_rows_takes_them_in_the_order_asked_for(family, rows):
    pair = Pair(family, 3, 6)
    before = snapshot(pair.paged)
    twin = split(pair, pair.paged.fork(rows))
    twin.dynamic.batch_select_indices(torch.tensor(rows))
    twin.agree()
    for name, tables in twin.paged.block_tables.items():
        assert tables == [pair.paged.block_tables[name][row] for row in rows]
    twin.feed(len(rows), 3)
    pair.agree()
    del twin
    after = snapshot(pair.paged)
    assert (after["tables"], after["stats"]) == (before["tables"], before["stats"])
    check_books(pair.paged)


def test_forking_a_row_that_is_not_there_is_refused_and_leaks_nothing():
    pair = Pair("llama", 2, 6)
    with pytest.raises(IndexError):
        pair.paged.fork([5])
    pair.agree_and_go_on(2)


def test_forking_rows_of_a_model_with_recurrent_layers_is_refused():
    config = transformers.Qwen3NextConfig(num_hidden_layers=4)
    cache = PagedCache(config, num_blocks=4)
    assert len(cache.fork()) == 4
    with pytest.raises(NotImplementedError, match="recurrent state"):
        cache.fork([0])


def test_pickling_is_refused_with_what_to_do_instead(tmp_path):
    for cache in (make_cache(), Pair("llama", 1, 3).paged):
        with pytest.raises(TypeError, match=r"PagedCache cannot be pickled.*token ids"):
            pickle.dumps(cache)
        with pytest.raises(TypeError, match="cannot be pickled"):
            torch.save({"cache": cache}, tmp_path / "cache.pt")


# Rows and steps given back -------------------------------------------------------------------------------------------


def test_released_rows_give_their_blocks_back_and_stay_in_the_batch(family):
    pair = Pair(family, 3, 6)
    kept = pair.paged.block_tables
    pair.paged.release([1])
    assert pair.paged.row_lengths == [6, 0, 6] and pair.paged.batch_size == 3 and pair.paged.get_seq_length() == 6
    for name, tables in pair.paged.block_tables.items():
        assert tables == [kept[name][0], [], kept[name][2]]
    assert pair.paged.stats().tokens == 12
    keys = pair.paged.layers[0].keys
    assert not keys[1].any() and torch.equal(keys[[0, 2]], pair.dynamic.layers[0].keys[[0, 2]])
    pair.paged.release([1, -1])
    assert pair.paged.row_lengths == [6, 0, 0]
    check_books(pair.paged)


@pytest.mark.parametrize("masked", [True, False], ids=["with a mask", "without a mask"])
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_after_a_release_the_other_rows_go_on_right_or_the_error_says_what_was_released(way, masked):
    model = tiny_model("llama")
    ids, _ = random_prompts([9, 9, 9])
    cache = make_cache()
    with run_way(model, way):
        forward(model, ids[:, :6], cache)
        cache.release([1])
        before = snapshot(cache)
        for i in range(6, 9):
            mask = {"attention_mask": torch.ones(3, i + 1, dtype=torch.long)} if masked else {}
            try:
                logits = forward(model, ids[:, i : i + 1], cache, **mask).logits
            except ValueError as error:
                assert "release" in str(error)
                assert_unchanged(cache, before)
                return
            assert cache.row_lengths == [i + 1, 0, i + 1] and torch.isfinite(logits).all()
            for row in (0, 2):
                expected = logits_alone(model, ids[row, : i + 1])[-1]
                torch.testing.assert_close(logits[row, 0], expected, atol=2e-4, rtol=1e-4)
    check_books(cache)


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_rollback_takes_the_last_step_back(family, tokens):
    pair = Pair(family, 2, 6)
    expected, before = copy.deepcopy(pair.dynamic), snapshot(pair.paged)
    pair.feed(2, tokens)
    pair.paged.rollback()
    assert_unchanged(pair.paged, before)
    pair.paged.rollback()  # there is nothing more to take back
    assert_unchanged(pair.paged, before)
    pair.dynamic = expected
    pair.agree_and_go_on(2)


def test_rollback_of_the_first_step_leaves_an_empty_cache(family):
    pair = Pair(family, 2, 6)
    pair.paged.rollback()
    assert (pair.paged.get_seq_length(), pair.paged.batch_size, pair.paged.stats().used_blocks) == (0, -1, 0)
    pair.dynamic = DynamicCache()
    pair.agree_and_go_on(3)


def test_rollback_of_a_step_that_copied_shared_blocks(family):
    pair = Pair(family, 2, 6)
    twin = split(pair, pair.paged.fork())
    before, expected = snapshot(twin.paged), copy.deepcopy(twin.dynamic)
    twin.feed(2, 1)
    twin.paged.rollback()
    after = snapshot(twin.paged)
    assert after["lengths"] == before["lengths"] and after["stats"] == before["stats"]
    twin.dynamic = expected
    twin.feed(2, 3)
    pair.feed(2, 3)
    twin.agree()
    pair.agree()


@pytest.mark.parametrize("meanwhile", ["deleted", "cropped and rewritten"])
def test_rollback_is_right_when_the_other_holder_changed_meanwhile(meanwhile):
    pair = Pair("llama", 2, 6)
    twin = split(pair, pair.paged.fork())
    expected = copy.deepcopy(twin.dynamic)
    twin.feed(2, 1)  # copies what it shares
    if meanwhile == "deleted":
        pair.paged = pair.dynamic = None
    else:
        pair.both("crop", -1)
        pair.feed(2, 2)  # over the token that was shared
    twin.paged.rollback()
    twin.dynamic = expected
    twin.agree()
    check_shared_books(*(side.paged for side in (twin, pair) if side.paged is not None))
    twin.feed(2, 3)
    if pair.paged is not None:
        pair.agree()


def test_rollback_does_nothing_once_the_rows_were_changed():
    pair = Pair("llama", 2, 6)
    pair.both("reorder_cache", torch.tensor([1, 0]))
    pair.paged.rollback()
    pair.agree_and_go_on(2)


def test_block_tables_are_named_by_kind_of_layer():
    cache = make_cache("gemma2")
    assert cache.block_tables == {"sliding_attention(8)": [], FULL: []}
    Pair.feed(pair := Pair("gemma2"), 2, 5)
    assert pair.paged.block_tables == {"sliding_attention(8)": [[0, 1], [2, 3]], FULL: [[0, 1], [2, 3]]}
    pair.paged.block_tables[FULL][0].append(7)  # a copy
    assert pair.paged.block_tables[FULL] == [[0, 1], [2, 3]]
    assert Pair("llama", 1, 5).paged.block_tables == {FULL: [[0, 1]]}


# What is accepted ----------------------------------------------------------------------------------------------------


def test_a_cache_without_a_config_is_refused_with_what_to_write():
    with pytest.raises(ValueError, match=r"PagedCache\(model\.config\)"):
        PagedCache()
    with pytest.raises(ValueError, match=r"PagedCache\(model\.config\)"):
        PagedCache(None)


@pytest.mark.parametrize("config", [{}, "llama", 16, tiny_model("llama")], ids=["dict", "str", "int", "model"])
def test_what_is_no_config_is_refused_by_its_type(config):
    with pytest.raises(TypeError, match=rf"model\.config, not {type(config).__name__}"):
        PagedCache(config)


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ("DeepseekV32Config", "indexed_attention|deepseek_sparse_attention"),
        ("InklingTextConfig", "hybrid_sliding"),
    ],
)
def test_layers_of_a_kind_that_cannot_be_paged_are_refused_by_name(config, kinds):
    config = getattr(transformers, config)()
    with pytest.raises(NotImplementedError, match=rf"{config.model_type} has layers of kind ({kinds})"):
        PagedCache(config)


def test_a_model_without_attention_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="mamba has no attention layers"):
        PagedCache(transformers.MambaConfig())


@pytest.mark.parametrize("config", ["RwkvConfig", "xLSTMConfig"])
def test_a_recurrent_model_whose_config_does_not_say_so_is_refused_by_name(config):
    config = getattr(transformers, config)()
    with pytest.raises(NotImplementedError, match=f"{config.model_type} is recurrent"):
        PagedCache(config)


# How it looks --------------------------------------------------------------------------------------------------------


def test_repr_tells_rows_tokens_and_blocks():
    config = tiny_model("llama").config
    assert repr(PagedCache(config)) == (
        "PagedCache(rows=0, length=0, tokens=0, blocks=0 of as many as fit, block_size=16)"
    )
    cache = Pair("llama", 2, 6, num_blocks=2000).paged
    assert repr(cache) == "PagedCache(rows=2, length=6, tokens=12, blocks=4 of 2,000, block_size=4)"


def test_the_notebook_picture_has_a_square_for_each_block_and_its_row():
    empty = make_cache()._repr_html_()
    assert "title=" not in empty and "0 of 64 blocks in use" in empty
    assert "<span" not in PagedCache(tiny_model("llama").config)._repr_html_()
    cache = Pair("llama", 2, 6).paged
    html = cache._repr_html_()
    assert html.count("<span") == 4 and "<script" not in html
    assert "block 0: row 0" in html and "block 3: row 1" in html
    assert "4 of 64 blocks in use" in html and "0 shared, waste 25.0%" in html
    cache.release([0])
    html = cache._repr_html_()
    assert "block 0: free" in html and "block 3: row 1" in html
    twin = cache.fork()
    assert "block 3: shared" in twin._repr_html_()


def test_the_text_map_marks_rows_shared_blocks_free_ones_and_those_of_others():
    pair = Pair("llama", 3, 6, num_blocks=20)
    cache = pair.paged
    legend = "of 20 blocks in use; a letter a row, # shared, · free"
    assert text_map(cache) == f"aabbcc\n6 {legend}"
    assert text_map(cache, width=4) == f"aabb\ncc\n6 {legend}"
    cache.release([1])
    assert text_map(cache) == f"aa··cc\n4 {legend}"
    cache.batch_select_indices(torch.tensor([0, 0, 2]))
    assert text_map(cache) == f"##··cc\n4 {legend}"
    other = PagedCache(tiny_model("llama").config, pool=cache.pool)
    key = torch.zeros(1, HEADS, 5, DIM)
    other.update(key, key, 0)
    assert text_map(cache) == f"##??cc\n6 {legend}, ? of another cache"
    assert text_map(other) == f"??aa??\n6 {legend}, ? of another cache"
    cache.reset()
    assert text_map(other) == f"··aa\n2 {legend}"
    other.reset()
    assert text_map(other) == f"0 {legend}"
    assert text_map(PagedCache(tiny_model("llama").config)).startswith("no blocks in use yet")


def test_pictures_of_hybrid_models_show_a_map_for_each_group():
    cache = Pair("gemma2", 1, 5).paged
    assert [line.split(":")[0] for line in text_map(cache).splitlines()[1::2]] == ["sliding_attention(8)", FULL]
    assert cache._repr_html_().count("<span") == 4


def test_many_rows_are_told_apart_in_the_notebook_picture():
    cache = PagedCache(tiny_model("llama").config, num_blocks=64, block_size=SIZE)
    key = torch.zeros(54, HEADS, 1, DIM)
    cache.update(key, key, 0)
    assert "block 53: row 53" in cache._repr_html_()


def test_rows_that_finished_store_again_after_generation_also_if_a_step_is_rolled_back():
    model = tiny_model("llama")
    cache, ids = PagedCache(model.config, num_blocks=64), torch.randint(5, 90, (3, 8))
    with paged_attention(model), torch.no_grad():
        forward(model, ids[:, :5], cache)
        cache.mark_finished(torch.tensor([True, False, False]))
        forward(model, ids[:, 5:6], cache)
        forward(model, ids[:, 6:7], cache)
        assert cache.row_lengths == [6, 7, 7]
        cache.clear_finished()
        cache.rollback()
        cache.release([1])
        forward(model, ids[:, 6:7], cache, attention_mask=torch.ones(3, 7, dtype=torch.long))
    assert cache.row_lengths == [7, 0, 7]


def test_padding_of_rows_that_are_gone_is_forgotten():
    model = tiny_model("llama")
    ids, mask = random_prompts([4, 7])
    cache = PagedCache(model.config, num_blocks=64)
    with paged_attention(model), torch.no_grad():
        forward(model, ids, cache, attention_mask=mask)
        cache.batch_select_indices(torch.tensor([1]))
        logits = forward(model, ids[1:, :1], cache).logits
    expected = logits_alone(model, torch.cat((ids[1], ids[1, :1])))[-1]
    torch.testing.assert_close(logits[0, 0], expected, atol=2e-4, rtol=1e-4)
