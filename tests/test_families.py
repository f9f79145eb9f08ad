"""Models with attention of their own, past transformers' attention interface: Bloom, Falcon, GPT-Neo and MPT."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from helpers import (
    ENABLED_WAYS,
    VOCAB,
    assert_unchanged,
    build_model,
    check_books,
    forward,
    generate,
    generate_dynamic,
    greedy_alone,
    random_prompts,
    run_way,
    same_tokens,
    snapshot,
    tiny_model,
)
from test_enable import loss_and_gradients, state_of
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.models.bloom import modeling_bloom

from hf_paged import (
    IMPLEMENTATION,
    PagedCache,
    disable_paged_attention,
    enable_paged_attention,
    paged_attention,
)
from hf_paged.cache import _CROPS_TO_A_LENGTH
from hf_paged.kernels import cpu, reference
from hf_paged.patches.compiled import EAGER_BECAUSE

RAGGED = (3, 17, 9)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {}),
    "bloom_six_heads": ("bloom", {"hidden_size": 96, "n_head": 6}),
    "falcon": ("falcon", {}),
    "falcon_many_heads": ("falcon", {"multi_query": False, "parallel_attn": False}),
    "falcon_new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_alibi": ("falcon", {"multi_query": False, "alibi": True}),
    "falcon_alibi_one_kv_head": ("falcon", {"alibi": True}),
    "falcon_alibi_rounded": (
        "falcon",
        {"multi_query": False, "alibi": True, "hidden_size": 96, "num_attention_heads": 6},
    ),
    "falcon_alibi_eager": ("falcon", {"multi_query": False, "alibi": True, "attn_implementation": "eager"}),
    "mpt": ("mpt", {}),
    "mpt_six_heads": ("mpt", {"d_model": 96, "n_heads": 6}),
    "gpt_neo": ("gpt_neo", {}),
}
USES_KERNEL = [name for name in VARIANTS if name != "falcon_alibi_rounded"]
ONE_EACH = ("bloom", "falcon", "falcon_alibi", "mpt", "gpt_neo")

every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_family = pytest.mark.parametrize("variant", ONE_EACH)
every_way = pytest.mark.parametrize("way", ENABLED_WAYS)

_models: dict[str, PreTrainedModel] = {}


def build(variant: str, **more: Any) -> PreTrainedModel:
    family, sizes = VARIANTS[variant]
    return build_model(family, **(sizes | more))


@pytest.fixture
def model(variant: str) -> Iterator[PreTrainedModel]:
    """The same at every call; not enabled, and found so afterwards."""
    if variant not in _models:
        _models[variant] = build(variant)
    before = state_of(_models[variant])
    yield _models[variant]
    assert state_of(_models[variant]) == before


def takes_positions(model: PreTrainedModel) -> bool:
    return model.config.model_type in ("falcon", "gpt_neo")


@contextlib.contextmanager
def counted(way: str) -> Iterator[collections.Counter]:
    """How often the kernels of a backend are called within."""
    backend, calls = {"cpu": cpu, "reference": reference}[way], collections.Counter()
    kernels = {name: getattr(backend, name) for name in ("decode", "prefill")}

    def count(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return kernels[name](*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in kernels:
            patch.setattr(backend, name, count(name))
        yield calls


# The same tokens -----------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@every_variant
@every_way
@pytest.mark.parametrize("block_size", [4, 16])
def test_a_left_padded_batch_equals_dynamic(model: PreTrainedModel, way: str, block_size: int) -> None:
    ids, mask = random_prompts(RAGGED)
    expected = generate_dynamic(model, ids, mask, max_new_tokens=30)
    with run_way(model, way):
        cache = PagedCache(model.config, block_size=block_size)
        output = generate(model, ids, mask, cache, max_new_tokens=30)
    same_tokens(model, output, expected, mask)
    assert cache.row_lengths == [length + 29 for length in RAGGED]  # padding is not stored
    check_books(cache)


@every_way
@pytest.mark.parametrize("variant", ["bloom", "mpt", "gpt_neo", "falcon_alibi"])
def test_each_row_is_what_it_is_alone(model: PreTrainedModel, way: str) -> None:
    ids, mask = random_prompts(RAGGED)
    with run_way(model, way):
        output = generate(model, ids, mask, PagedCache(model.config, block_size=4), max_new_tokens=20)
    for row, length in enumerate(RAGGED):
        same_tokens(model, output[row, -length - 20 :], greedy_alone(model, ids[row, -length:], 20))


@every_way
@pytest.mark.parametrize("variant", USES_KERNEL)
def test_every_layer_uses_the_kernel_in_every_step(model: PreTrainedModel, way: str) -> None:
    ids, mask = random_prompts(RAGGED)
    with run_way(model, way), counted(way) as calls:
        generate(model, ids, mask, PagedCache(model.config), max_new_tokens=11)
    layers = model.config.num_hidden_layers
    assert calls == {"prefill": layers, "decode": 10 * layers}


@every_way
@pytest.mark.parametrize("variant", ["falcon_alibi"])
def test_falcons_alibi_takes_the_dense_way_where_the_model_rounds_it(model: PreTrainedModel, way: str) -> None:
    """From 257 positions on bfloat16 cannot hold all of them."""
    ids, mask = random_prompts([250, 200])
    expected = generate_dynamic(model, ids, mask, max_new_tokens=40)
    with run_way(model, way), counted(way) as calls:
        output = generate(model, ids, mask, PagedCache(model.config), max_new_tokens=40)
    same_tokens(model, output, expected, mask)
    assert calls["decode"] == 6 * model.config.num_hidden_layers


@every_family
@every_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_finite_and_close(variant: str, way: str, dtype: torch.dtype) -> None:
    model = build(variant).to(dtype)
    ids, mask = random_prompts(RAGGED)
    exact = build(variant).to(dtype).float()  # the same rounded weights
    with torch.no_grad():
        expected = exact(input_ids=ids, attention_mask=mask, use_cache=False).logits
        with run_way(model, way):
            cache = PagedCache(model.config)
            first = forward(model, ids[:, :-1], cache, attention_mask=mask[:, :-1]).logits
            last = forward(model, ids[:, -1:], cache, attention_mask=mask).logits
    actual = torch.cat((first, last), dim=1)
    assert actual.isfinite().all()
    scale = float(expected[mask.bool()].std())
    error = (actual.float() - expected)[mask.bool()].abs().max() / scale
    assert error < (0.3 if dtype == torch.bfloat16 else 0.05)


# Modes of generate() and of the cache --------------------------------------------------------------------------------


@every_family
@every_way
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {"eos_token_id": list(range(1, VOCAB, 7))}],
    ids=["beams", "samples", "rows_end"],
)
def test_modes_of_generate(model: PreTrainedModel, way: str, options: dict[str, Any]) -> None:
    ids, mask = random_prompts(RAGGED)
    torch.manual_seed(3)
    expected = generate_dynamic(model, ids, mask, max_new_tokens=18, **options)
    with run_way(model, way):
        torch.manual_seed(3)
        cache = PagedCache(model.config, block_size=4)
        assert generate(model, ids, mask, cache, max_new_tokens=18, **options).equal(expected)
    check_books(cache)


@every_variant
@every_way
def test_a_second_turn_with_padding_between(model: PreTrainedModel, way: str) -> None:
    """Every row is what it is alone: padding between its tokens takes no place in it."""
    first, first_mask = random_prompts(RAGGED)
    more, more_mask = random_prompts([6, 2, 4], seed=5)
    ids, mask = torch.cat((first, more), dim=1), torch.cat((first_mask, more_mask), dim=1)
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if takes_positions(model) else {}
    with run_way(model, way), torch.no_grad():
        cache = PagedCache(model.config, block_size=4)
        past = first.shape[1]
        parts = {name: tensor.split([past, more.shape[1]], dim=1) for name, tensor in positions.items()}
        forward(model, first, cache, attention_mask=first_mask, **{name: part[0] for name, part in parts.items()})
        logits = forward(model, more, cache, attention_mask=mask, **{name: part[1] for name, part in parts.items()})
    for row in range(3):
        tokens = ids[row][mask[row].bool()]
        alone = model(input_ids=tokens[None], use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits.logits[row, -1], alone, rtol=1e-3, atol=1e-3)


@every_variant
@every_way
def test_a_conversation_goes_on_after_a_crop(model: PreTrainedModel, way: str) -> None:
    ids, mask = random_prompts(RAGGED)
    with run_way(model, way):
        cache = PagedCache(model.config, block_size=4)
        begun = generate(model, ids, mask, cache, max_new_tokens=12)
        cache.crop(cache.get_seq_length() - 5 if _CROPS_TO_A_LENGTH else -5)
        longer = torch.nn.functional.pad(mask, (0, 12), value=1)
        output = generate(model, begun, longer, cache, max_new_tokens=15)
    same_tokens(model, output, generate_dynamic(model, begun, longer, max_new_tokens=15), longer)


@every_family
@every_way
def test_assisted_decoding_and_prompt_lookup(model: PreTrainedModel, way: str) -> None:
    ids, _ = random_prompts([12])
    expected = generate_dynamic(model, ids, max_new_tokens=25)
    with run_way(model, way):
        output = generate(model, ids, None, PagedCache(model.config), max_new_tokens=25, prompt_lookup_num_tokens=3)
        same_tokens(model, output, expected)
        helper = tiny_model("gpt2")
        output = generate(model, ids, None, PagedCache(model.config), max_new_tokens=25, assistant_model=helper)
        same_tokens(model, output, expected)


@every_family
@every_way
def test_prompts_that_are_kept_and_shared(model: PreTrainedModel, way: str) -> None:
    ids, mask = random_prompts([33, 21])
    expected = generate_dynamic(model, ids, mask, max_new_tokens=12)
    with run_way(model, way):
        cache = PagedCache(model.config, prefix_cache=True, block_size=4)
        for _ in range(2):
            same_tokens(model, generate(model, ids, mask, cache, max_new_tokens=12), expected, mask)


@every_variant
@every_way
def test_attention_weights_when_asked_for(model: PreTrainedModel, variant: str, way: str) -> None:
    ids, mask = random_prompts(RAGGED)
    options = {"output_attentions": True, "return_dict_in_generate": True}
    # With sdpa Falcon's own code adds a bool mask to the scores when it is asked, or ALiBi twice.
    own = build(variant, attn_implementation="eager") if model.config.model_type == "falcon" else model
    expected = generate_dynamic(own, ids, mask, **options)
    with run_way(model, way):
        actual = generate(model, ids, mask, PagedCache(model.config), **options)
    same_tokens(model, actual.sequences, generate_dynamic(model, ids, mask), mask)
    real = mask.bool()[:, None, :, None]
    for step, ours in enumerate(actual.attentions):
        assert len(ours) == model.config.num_hidden_layers
        for layer, one in enumerate(ours):
            one = one.masked_fill(~real, 0) if step == 0 else one
            sums = one.sum(dim=-1, keepdim=True)
            torch.testing.assert_close(sums, real.expand_as(sums).float() if step == 0 else torch.ones_like(sums))
            if own is model or not model.config.alibi:
                other = expected.attentions[step][layer]
                other = other.masked_fill(~real, 0) if step == 0 else other
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@every_family
@every_way
def test_a_mask_that_hides_stored_tokens(model: PreTrainedModel, way: str) -> None:
    ids, _ = random_prompts([14, 14])
    hiding = torch.ones(2, 14, dtype=torch.long)
    hiding[0, :4] = 0
    positions = {"position_ids": torch.tensor([[13], [13]])} if takes_positions(model) else {}

    def last(cache: Any) -> torch.Tensor:
        with torch.no_grad():
            forward(model, ids[:, :-1], cache, attention_mask=torch.ones(2, 13, dtype=torch.long))
            return forward(model, ids[:, -1:], cache, attention_mask=hiding, **positions).logits

    expected = last(DynamicCache(config=model.config))
    with run_way(model, way):
        torch.testing.assert_close(last(PagedCache(model.config)), expected, rtol=1e-3, atol=1e-4)


@every_way
@pytest.mark.parametrize("variant", ["falcon", "gpt_neo", "mpt"])
def test_a_custom_mask_is_read_as_the_model_reads_it(model: PreTrainedModel, way: str) -> None:
    ids, _ = random_prompts([9, 9])
    allowed = torch.ones(9, 9, dtype=torch.bool).tril() & (torch.arange(9) != 3)
    added = torch.zeros(9, 9).masked_fill(~allowed, torch.finfo(torch.float32).min)
    # To MPT a mask says what must not be seen.
    custom = (~allowed if model.config.model_type == "mpt" else added).expand(2, 1, 9, 9)
    with torch.no_grad():
        expected = forward(model, ids, DynamicCache(config=model.config), attention_mask=custom).logits
        with run_way(model, way):
            actual = forward(model, ids, PagedCache(model.config), attention_mask=custom).logits
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


@every_family
def test_an_error_in_the_middle_leaves_the_cache_as_it_was(model: PreTrainedModel) -> None:
    ids, mask = random_prompts(RAGGED)
    with paged_attention(model):
        cache = PagedCache(model.config, block_size=4)
        begun = generate(model, ids, mask, cache, max_new_tokens=6)
        before, calls = snapshot(cache), 0
        decode = cpu.decode

        def fail(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise MemoryError
            return decode(*args, **kwargs)

        longer = torch.nn.functional.pad(mask, (0, 6), value=1)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(cpu, "decode", fail)
            generate(model, begun, longer, cache, max_new_tokens=6)
        assert_unchanged(cache, before)
        output = generate(model, begun, longer, cache, max_new_tokens=6)
    same_tokens(model, output, generate_dynamic(model, begun, longer, max_new_tokens=6), longer)


def test_falcons_new_architecture_stores_each_key_once() -> None:
    model = build("falcon_new")
    ids, mask = random_prompts(RAGGED)
    expected = generate_dynamic(model, ids, mask, max_new_tokens=20)
    with paged_attention(model):
        cache = PagedCache(model.config)
        generate(model, ids, mask, cache)
        assert cache.layers[0].keys.shape[1] == 2
    # The blocks of a cache that was begun without paged attention hold them for every head.
    cache = PagedCache(model.config)
    begun = generate(model, ids, mask, cache, max_new_tokens=8)
    longer = torch.nn.functional.pad(mask, (0, 8), value=1)
    with paged_attention(model):
        same_tokens(model, generate(model, begun, longer, cache, max_new_tokens=12), expected, mask)
    assert cache.layers[0].keys.shape[1] == 4


# Switching over and back ---------------------------------------------------------------------------------------------


@every_variant
def test_disable_restores_everything(model: PreTrainedModel) -> None:
    before = state_of(model)
    ids, mask = random_prompts(RAGGED)
    for _ in range(2):
        assert enable_paged_attention(model) is model
        enabled = state_of(model)
        assert enabled != before and model.config._attn_implementation == IMPLEMENTATION
        assert enable_paged_attention(model) is model
        assert state_of(model) == enabled
        generate(model, ids, mask, PagedCache(model.config))
        assert disable_paged_attention(model) is model
        assert state_of(model) == before
    with pytest.raises(KeyboardInterrupt), paged_attention(model):
        raise KeyboardInterrupt
    assert state_of(model) == before


@every_family
def test_a_part_of_an_enabled_model_may_be_enabled_too(model: PreTrainedModel) -> None:
    before = state_of(model)
    enable_paged_attention(model)
    enable_paged_attention(model.transformer)
    disable_paged_attention(model.transformer)
    ids, mask = random_prompts(RAGGED)
    expected = generate(model, ids, mask, PagedCache(model.config))
    disable_paged_attention(model)
    assert state_of(model) == before
    same_tokens(model, expected, generate_dynamic(model, ids, mask), mask)


@every_family
def test_other_models_of_the_family_do_not_change(model: PreTrainedModel, variant: str) -> None:
    other = build(variant)
    before = state_of(other)
    with paged_attention(model):
        assert state_of(other) == before


@every_variant
def test_a_deep_copy_works_on_its_own(variant: str) -> None:
    model = build(variant)
    ids, mask = random_prompts(RAGGED)
    with paged_attention(model):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.lm_head.weight.copy_(twin.lm_head.weight.flip(0))
            for name, parameter in twin.named_parameters():
                if "query_key_value.weight" in name or "q_proj.weight" in name or "Wqkv" in name:
                    parameter.neg_()
        output = generate(model, ids, mask, PagedCache(model.config))
    same_tokens(model, output, generate_dynamic(model, ids, mask), mask)
    with counted("cpu") as calls:
        output = generate(twin, ids, mask, PagedCache(twin.config))
    assert bool(calls) == (variant in USES_KERNEL)
    disable_paged_attention(twin)
    assert not any("forward" in vars(module) for module in twin.modules())
    assert all(getattr(m, "config", twin.config) is twin.config for m in twin.modules())
    same_tokens(twin, output, generate_dynamic(twin, ids, mask), mask)


@every_family
def test_an_enabled_model_is_not_kept_alive(variant: str) -> None:
    model = enable_paged_attention(build(variant))
    ids, mask = random_prompts(RAGGED)
    cache = PagedCache(model.config)
    generate(model, ids, mask, cache, max_new_tokens=2)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


# Without our cache ---------------------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("use_cache", [True, False])
def test_training_of_an_enabled_model_equals_itself_before(variant: str, use_cache: bool) -> None:
    model = build(variant).train()
    ids, mask = random_prompts(RAGGED)
    labels = ids.masked_fill((mask == 0) | (mask.cumsum(1) == 1), -100)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": use_cache}
    torch.manual_seed(0)
    loss, gradients = loss_and_gradients(model, **inputs)
    with paged_attention(model):
        torch.manual_seed(0)
        enabled_loss, enabled_gradients = loss_and_gradients(model, **inputs)
    assert enabled_loss.equal(loss)
    for name, gradient in gradients.items():
        assert gradient.equal(enabled_gradients[name]), name


@every_variant
def test_other_caches_give_bit_for_bit_what_they_gave(model: PreTrainedModel) -> None:
    ids, mask = random_prompts(RAGGED)
    options = {"output_logits": True, "return_dict_in_generate": True, "output_attentions": False}

    def runs() -> list[Any]:
        found = [generate(model, ids, mask, cache, **options) for cache in (None, DynamicCache(config=model.config))]
        found.append(generate(model, ids, mask, None, use_cache=False, max_new_tokens=3, **options))
        if model.config.model_type != "mpt" and not getattr(model.config, "alibi", False):  # whose own code cannot
            found.append(generate(model, ids, mask, StaticCache(config=model.config, max_cache_len=40), **options))
        return found

    expected = runs()
    with paged_attention(model):
        for ours, theirs in zip(runs(), expected, strict=True):
            assert ours.sequences.equal(theirs.sequences)
            for one, other in zip(ours.logits, theirs.logits, strict=True):
                assert one.equal(other)


@every_family
def test_a_backward_pass_through_the_cache_is_refused(variant: str) -> None:
    model = build(variant)
    ids, mask = random_prompts(RAGGED)
    with paged_attention(model):
        logits = forward(model, ids, PagedCache(model.config), attention_mask=mask).logits
        with pytest.raises(NotImplementedError, match="backward"):
            logits.sum().backward()


# Refusing ------------------------------------------------------------------------------------------------------------


def test_a_forward_of_another_library_is_refused() -> None:
    model = build("bloom")
    attention = model.transformer.h[1].self_attention
    attention.forward = attention.forward
    before = state_of(model)
    with pytest.raises(NotImplementedError, match=r"BloomForCausalLM.*another library"):
        enable_paged_attention(model)
    assert state_of(model) == before


def test_another_class_of_attention_is_refused() -> None:
    model = build("gpt_neo")
    kind = type(model.transformer.h[0].attn.attention)
    model.transformer.h[0].attn.attention.__class__ = type("OtherAttention", (kind,), {})
    with pytest.raises(NotImplementedError, match=r"GPTNeoForCausalLM.*OtherAttention"):
        enable_paged_attention(model)


def test_another_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("falcon")
    attention = type(model.transformer.h[0].self_attention)
    monkeypatch.setattr(attention, "forward", lambda self, hidden_states, sinks: None)
    with pytest.raises(NotImplementedError, match=r"FalconForCausalLM.*FalconAttention of this transformers version"):
        enable_paged_attention(model)


def test_settings_that_are_not_served_are_refused() -> None:
    model = build("bloom", pretraining_tp=2, slow_but_exact=True)
    with pytest.raises(NotImplementedError, match="slow_but_exact"):
        enable_paged_attention(model)


def test_our_name_alone_is_refused_where_it_would_not_reach_the_attention() -> None:
    config = copy.deepcopy(build("bloom").config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION).eval()
    ids, mask = random_prompts(RAGGED)
    for cache in (None, PagedCache(model.config)):
        with pytest.raises(NotImplementedError, match="bloom computes attention in its own code"):
            generate(model, ids, mask, cache)
    with paged_attention(model):
        output = generate(model, ids, mask, PagedCache(model.config))
        same_tokens(model, output, generate_dynamic(model, ids, mask), mask)


# Compiled steps ------------------------------------------------------------------------------------------------------


@every_family
def test_a_model_whose_forward_the_user_compiled(variant: str) -> None:
    model = build(variant)
    ids, mask = random_prompts(RAGGED)
    expected = generate_dynamic(model, ids, mask, max_new_tokens=6)
    torch._dynamo.reset()
    with paged_attention(model):
        model.forward = torch.compile(model.forward, backend="eager")
        output = generate(model, ids, mask, PagedCache(model.config), max_new_tokens=6)
        del model.forward
    same_tokens(model, output, expected, mask)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("variant", "compiles"),
    [
        ("bloom", hasattr(modeling_bloom, "_get_alibi_slopes")),  # before, ALiBi was as long as a mask of ones
        ("falcon", True),
        ("falcon_new", True),
        ("falcon_alibi", False),
        ("mpt", False),
        ("gpt_neo", False),
    ],
)
def test_compiled_or_eager_the_tokens_are_the_same(variant: str, compiles: bool) -> None:
    model = build(variant)
    ids, mask = random_prompts(RAGGED)
    expected = generate_dynamic(model, ids, mask, max_new_tokens=25)
    torch._dynamo.reset()
    with run_way(model, "compiled"):
        for block_size in (16, 16, 1):  # with the last the block table is replaced by a wider one
            cache = PagedCache(model.config, block_size=block_size)
            output = generate(model, ids, mask, cache, max_new_tokens=25)
            same_tokens(model, output, expected, mask)
        assert (EAGER_BECAUSE not in vars(model)) == compiles
    torch._dynamo.reset()
