"""Steps that fail: whatever stops one, and wherever, cache and books are as before it, and the next call is right."""

import contextlib
import copy

import pytest
import torch
from helpers import (
    WAYS,
    assert_unchanged,
    build_model,
    check_books,
    forward,
    generate,
    greedy_alone,
    logits_alone,
    random_prompts,
    run_way,
    same_tokens,
    snapshot,
    tiny_model,
)

from hf_paged import OutOfBlocksError, PagedCache, paged_attention

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, DIM, SIZE = 2, 16, 4
FAMILIES = ["llama", "gemma2"]  # one kind of layers; windows of 8 and full attention in turn


class BrokenBackend:
    """A backend whose writes fail."""

    def __init__(self, backend, error):
        self.backend, self.error = backend, error

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def write(self, *args):
        raise self.error


def three_layers():
    return build_model("llama", num_hidden_layers=3)


@contextlib.contextmanager
def broken(model, cache, where, error):
    """Within, a step fails in a layer of the model before it gets to the cache, or in the kernel that writes."""
    what, index = where.split()

    def fail(*args):
        raise error

    if what == "layer":
        hook = model.model.layers[int(index)].register_forward_pre_hook(fail)
        try:
            yield
        finally:
            hook.remove()
    else:
        if not cache.is_initialized:
            cache.early_initialization(2, HEADS, DIM, torch.float32, torch.device("cpu"))
        layer = cache.layers[int(index)]
        backend, layer.backend = layer.backend, BrokenBackend(layer.backend, error)
        try:
            yield
        finally:
            layer.backend = backend


PLACES = ["layer 0", "layer 1", "write 0", "write 2"]
ERRORS = [RuntimeError("a kernel failed"), KeyboardInterrupt()]


@pytest.mark.parametrize("error", ERRORS, ids=["error", "interrupt"])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(("filled", "step"), [(0, 4), (6, 1), (6, 3)])
@torch.no_grad()
def test_a_step_that_fails_on_an_enabled_model_is_undone_and_the_next_call_is_right(where, filled, step, error):
    model = three_layers()
    ids, _ = random_prompts([12, 12])
    cache = PagedCache(model.config, block_size=SIZE, num_blocks=32)
    with paged_attention(model):
        if filled:
            forward(model, ids[:, :filled], cache)
        before = snapshot(cache)
        with broken(model, cache, where, error), pytest.raises(type(error)):
            forward(model, ids[:, filled : filled + step], cache)
        if isinstance(error, RuntimeError) or where.startswith("write"):
            assert_unchanged(cache, before)
        # Of an interrupt between the layers no hook is told; the next pass takes the interrupted one back.
        logits = forward(model, ids[:, filled : filled + step], cache).logits
    for row in range(2):
        expected = logits_alone(model, ids[row, : filled + step])[filled:]
        torch.testing.assert_close(logits[row], expected, atol=2e-4, rtol=1e-4)
    check_books(cache)


@pytest.mark.parametrize("error", ERRORS, ids=["error", "interrupt"])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(("filled", "step"), [(0, 4), (6, 1), (6, 3)])
@torch.no_grad()
def test_a_step_that_fails_on_a_plain_model_is_noticed_by_the_next_call_and_undone(where, filled, step, error):
    model = three_layers()
    ids, _ = random_prompts([12, 12])
    cache = PagedCache(model.config, block_size=SIZE, num_blocks=32)
    if filled:
        forward(model, ids[:, :filled], cache)
    before = snapshot(cache)
    with broken(model, cache, where, error), pytest.raises(type(error)):
        forward(model, ids[:, filled : filled + step], cache)
    if where.startswith("write"):
        assert_unchanged(cache, before)  # the failure was the cache's own
    if where == "layer 1":  # some layers hold the step, and others do not
        with pytest.raises(RuntimeError, match=r"stopped half-way.*has been put back to.*run that step again"):
            forward(model, ids[:, filled : filled + step], cache)
        assert_unchanged(cache, before)
    logits = forward(model, ids[:, filled : filled + step], cache).logits
    for row in range(2):
        expected = logits_alone(model, ids[row, : filled + step])[filled:]
        torch.testing.assert_close(logits[row], expected, atol=2e-4, rtol=1e-4)
    check_books(cache)


# A model that is not enabled can fail between its layers unseen, with transformers' own caches as well.
@pytest.mark.parametrize(("undoing", "enabled"), [("failure", True), ("rollback", True), ("rollback", False)])
@torch.no_grad()
def test_recurrent_layers_are_put_back_with_the_rest_or_the_next_call_refuses(undoing, enabled):
    model = build_model("qwen3_next")
    config = model.config
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    (ids,) = random_prompts([8])[:1]
    cache = PagedCache(config, block_size=SIZE, num_blocks=8)
    with paged_attention(model) if enabled else contextlib.nullcontext():
        forward(model, ids[:, :6], cache)
        try:
            if undoing == "failure":
                with (
                    broken(model, cache, "layer 3", RuntimeError("broken")),
                    pytest.raises(RuntimeError, match="broken"),
                ):
                    forward(model, ids[:, 6:7], cache)
            else:
                forward(model, ids[:, 6:7], cache)
                cache.rollback()
            logits = forward(model, ids[:, 6:7], cache).logits[0, 0]
        except (RuntimeError, NotImplementedError) as refusal:
            assert "recurrent" in str(refusal)
            return
    torch.testing.assert_close(logits, logits_alone(model, ids[0, :7])[-1], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("change", ["crop", "fork", "deepcopy", "reorder", "release", "reset", "rollback"])
@torch.no_grad()
def test_a_half_written_step_is_gone_whatever_is_done_next(change):
    model = three_layers()
    ids, _ = random_prompts([12, 12])
    cache = PagedCache(model.config, block_size=SIZE, num_blocks=32)
    forward(model, ids[:, :6], cache)
    before = snapshot(cache)
    with broken(model, cache, "layer 1", KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        forward(model, ids[:, 6:8], cache)
    if change == "reset":
        cache.reset()
        assert cache.stats().used_blocks == 0
        return
    if change != "rollback":
        with pytest.raises(RuntimeError, match="has been put back"):
            {
                "crop": lambda: cache.crop(-1),
                "fork": cache.fork,
                "deepcopy": lambda: copy.deepcopy(cache),
                "reorder": lambda: cache.reorder_cache(torch.tensor([1, 0])),
                "release": lambda: cache.release([0]),
            }[change]()
    else:
        cache.rollback()
    assert_unchanged(cache, before)
    logits = forward(model, ids[:, 6:8], cache).logits
    torch.testing.assert_close(logits[0], logits_alone(model, ids[0, :8])[6:], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupted_generation_can_be_taken_up_again(way):
    model = three_layers()
    (ids,) = random_prompts([7])[:1]
    cache = PagedCache(model.config, block_size=SIZE, num_blocks=32)
    calls = 0

    def interrupt(*args):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with run_way(model, way):
        with pytest.raises(KeyboardInterrupt):
            generate(model, ids, cache=cache)
        hook.remove()
        expected = greedy_alone(model, ids[0], 12)
        if way == "plain":
            with pytest.raises(RuntimeError, match="has been put back to the 9 positions"):
                cache.crop(-1)
        assert cache.row_lengths == [9]
        out = generate(model, expected[None, :10], cache=cache, max_new_tokens=9)
    same_tokens(model, out[0], expected)
    check_books(cache)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_running_out_of_blocks_in_a_generation_leaves_the_step_before_and_says_so(family, way):
    model = tiny_model(family)
    ids, _ = random_prompts([7, 7])
    # Two blocks a row, and one that is not enough for two.
    cache = PagedCache(model.config, block_size=SIZE, num_blocks=5)
    with run_way(model, way):
        with pytest.raises(OutOfBlocksError) as caught:
            generate(model, ids, cache=cache)
        assert (caught.value.needed, caught.value.free, caught.value.total) == (2, 1, 5)
        assert cache.row_lengths == [8, 8] and cache.get_seq_length() == 8
        assert cache.stats().free_blocks == len(cache.block_tables)
        check_books(cache)
        cache.batch_select_indices(torch.tensor([1]))  # room for two rows' blocks, for one row
        expected = greedy_alone(model, ids[1], 12)
        out = generate(model, expected[None, :9], cache=cache, max_new_tokens=10)
    same_tokens(model, out[0], expected)
    check_books(cache)


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_that_does_not_fit_leaves_an_empty_cache(way):
    model = tiny_model("llama")
    cache = PagedCache(model.config, block_size=SIZE, num_blocks=3)
    with run_way(model, way):
        with pytest.raises(OutOfBlocksError):
            generate(model, *random_prompts([7, 7]), cache=cache)
        assert (cache.get_seq_length(), cache.batch_size, cache.stats().used_blocks) == (0, -1, 0)
        ids, _ = random_prompts([7])
        same_tokens(model, generate(model, ids, cache=cache, max_new_tokens=5)[0], greedy_alone(model, ids[0], 5))
