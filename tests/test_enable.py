"""Switching a model over to paged attention and back: what changes, what does not, and who is refused."""

from __future__ import annotations

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
    CACHE_ARGUMENT,
    ENABLED_WAYS,
    VOCAB,
    WAYS,
    build_model,
    generate,
    generate_dynamic,
    greedy_alone,
    random_prompts,
    run_way,
    same_tokens,
    tiny_model,
)
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LogitsProcessorList,
    PreTrainedModel,
)

from hf_paged import IMPLEMENTATION, PagedCache, disable_paged_attention, enable_paged_attention, paged_attention

RAGGED = (3, 17, 9)
FAMILIES = ("llama", "qwen3", "gpt2", "mistral", "gemma2", "gpt_oss")


def tiny_llava() -> PreTrainedModel:
    """A model with sub-configs and sub-models."""
    text = tiny_model("llama").config.to_dict()
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=VOCAB - 1)
        return LlavaForConditionalGeneration(config).eval()


def state_of(model: torch.nn.Module) -> list[Any]:
    """Everything of a model, its modules and its configs that enabling could touch, in a form that compares."""
    found: list[Any] = []
    configs: dict[int, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        attributes = {}
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules"):
                attributes[key] = {inner: id(tensor) for inner, tensor in value.items()}
            elif isinstance(value, dict):
                attributes[key] = [(inner, id(one)) for inner, one in value.items()]
            else:
                attributes[key] = id(value)
        found.append((name, type(module), attributes))
        if (config := getattr(module, "config", None)) is not None:
            configs[id(config)] = config
    for config in list(configs.values()):
        for key in getattr(config, "sub_configs", {}):
            if (sub := getattr(config, key, None)) is not None:
                configs[id(sub)] = sub
    for number, config in configs.items():
        found.append((number, {k: v if isinstance(v, str | int | None) else id(v) for k, v in vars(config).items()}))
        found.append((number, config.to_json_string(use_diff=False), config._attn_implementation))
    if isinstance(model, PreTrainedModel):
        found.append(model.generation_config.to_json_string())
    return found


MAKERS = {family: (lambda family=family: tiny_model(family)) for family in FAMILIES} | {"llava": tiny_llava}


@pytest.fixture(params=list(MAKERS))
def any_model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    model = MAKERS[request.param]()
    before = state_of(model)
    yield model
    assert state_of(model) == before  # also after every test here


@pytest.fixture
def llama() -> Iterator[PreTrainedModel]:
    model = tiny_model("llama")
    before = state_of(model)
    yield model
    assert state_of(model) == before


# Undoing ---------------------------------------------------------------------------------------------------------


def test_disable_restores_everything(any_model: PreTrainedModel) -> None:
    before = state_of(any_model)
    assert enable_paged_attention(any_model) is any_model
    assert any_model.config._attn_implementation == IMPLEMENTATION
    assert state_of(any_model) != before
    assert disable_paged_attention(any_model) is any_model
    assert state_of(any_model) == before


def test_disable_restores_everything_after_use(llama: PreTrainedModel) -> None:
    before = state_of(llama)
    ids, mask = random_prompts(RAGGED)
    for _ in range(2):
        enable_paged_attention(llama)
        generate(llama, ids, mask, PagedCache(llama.config), eos_token_id=list(range(1, VOCAB, 4)))
        generate(llama, ids, mask)
        disable_paged_attention(llama)
        # generate() itself keeps nothing on the model but what it keeps without us
        assert state_of(llama) == before


def test_twice_is_harmless(any_model: PreTrainedModel) -> None:
    before = state_of(any_model)
    disable_paged_attention(any_model)
    assert state_of(any_model) == before
    enable_paged_attention(any_model)
    enabled = state_of(any_model)
    enable_paged_attention(any_model)
    assert state_of(any_model) == enabled
    disable_paged_attention(any_model)
    assert state_of(any_model) == before
    disable_paged_attention(any_model)
    assert state_of(any_model) == before


def test_the_context_manager_undoes_after_an_exception(any_model: PreTrainedModel) -> None:
    before = state_of(any_model)
    with pytest.raises(KeyboardInterrupt), paged_attention(any_model) as same:
        assert same is any_model
        assert any_model.config._attn_implementation == IMPLEMENTATION
        raise KeyboardInterrupt
    assert state_of(any_model) == before


def test_the_context_manager_undoes_after_an_exception_inside_generate(llama: PreTrainedModel) -> None:
    before = state_of(llama)
    ids, mask = random_prompts(RAGGED)

    def fail(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 20:
            raise KeyboardInterrupt
        return scores

    with pytest.raises(KeyboardInterrupt), paged_attention(llama):
        generate(llama, ids, mask, PagedCache(llama.config), logits_processor=LogitsProcessorList([fail]))
    assert state_of(llama) == before
    expected = generate_dynamic(llama, ids, mask)
    same_tokens(llama, generate(llama, ids, mask, PagedCache(llama.config)), expected, mask)


def test_nested_context_managers_disable_with_the_outermost(llama: PreTrainedModel) -> None:
    before = state_of(llama)
    with paged_attention(llama):
        enabled = state_of(llama)
        with contextlib.suppress(ZeroDivisionError), paged_attention(llama):
            _ = 1 / 0
        assert state_of(llama) == enabled
    assert state_of(llama) == before


def test_the_context_manager_leaves_a_model_enabled_that_was_so_before(llama: PreTrainedModel) -> None:
    enable_paged_attention(llama)
    with paged_attention(llama):
        pass
    assert llama.config._attn_implementation == IMPLEMENTATION
    disable_paged_attention(llama)


def test_a_hook_and_a_generate_of_the_users_own_survive() -> None:
    calls = []
    llama = build_model("llama")
    llama.register_forward_hook(lambda *_: calls.append("hook"))
    own = llama.generate  # an attribute on the object itself, as some libraries set it

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append("generate")
        return own(*args, **kwargs)

    llama.generate = wrapped
    ids, mask = random_prompts(RAGGED)
    before = state_of(llama)
    with paged_attention(llama):
        generate(llama, ids, mask, PagedCache(llama.config), max_new_tokens=2)
    assert state_of(llama) == before
    assert llama.generate is wrapped
    assert calls == ["generate", "hook", "hook"]


def test_an_implementation_set_while_enabled_is_the_users_word(llama: PreTrainedModel) -> None:
    """Whatever set_attn_implementation says in between, the model runs, and disabling puts the old one back."""
    ids, mask = random_prompts(RAGGED)
    with paged_attention(llama):
        llama.set_attn_implementation("eager")
        actual = generate(llama, ids, mask, PagedCache(llama.config))
    same_tokens(llama, actual, generate_dynamic(llama, ids, mask), mask)


# Copies ----------------------------------------------------------------------------------------------------------


def test_a_deep_copy_of_an_enabled_model_works_on_its_own(llama: PreTrainedModel) -> None:
    ids, mask = random_prompts(RAGGED)
    eos = {"eos_token_id": list(range(1, VOCAB, 4))}
    with paged_attention(llama):
        twin = copy.deepcopy(llama)
        with torch.no_grad():
            twin.lm_head.weight.copy_(twin.lm_head.weight.flip(0))
    for model in (twin, llama):
        expected = [greedy_alone(model, row[row_mask.bool()], 12) for row, row_mask in zip(ids, mask, strict=True)]
        for _ in range(2):
            cache = PagedCache(model.config)
            output = generate(model, ids, mask, cache)
            for row, tokens in enumerate(expected):
                same_tokens(model, output[row, -len(tokens) :], tokens)
    # The copy is still enabled, follows its own rows, and can be disabled by itself.
    cache = PagedCache(twin.config)
    output = generate(twin, ids, mask, cache, **eos)
    same_tokens(twin, output, generate_dynamic(twin, ids, mask, **eos), mask)
    assert cache.row_lengths[0] < cache.get_seq_length() and twin.config._attn_implementation == IMPLEMENTATION
    disable_paged_attention(twin)
    assert twin.config._attn_implementation == "sdpa"
    assert "generate" not in vars(twin) and not twin._forward_hooks and not twin._forward_pre_hooks
    same_tokens(twin, generate(twin, ids, mask, PagedCache(twin.config)), generate_dynamic(twin, ids, mask), mask)


def test_an_enabled_model_is_not_kept_alive() -> None:
    model = build_model("llama")
    enable_paged_attention(model)
    ids, mask = random_prompts(RAGGED)
    cache = PagedCache(model.config)
    generate(model, ids, mask, cache, max_new_tokens=2)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert cache.stats().tokens > 0


def test_an_enabled_model_can_be_saved(tmp_path: Any) -> None:
    llama = build_model("llama")
    with paged_attention(llama):
        llama.save_pretrained(tmp_path)
    ids, mask = random_prompts(RAGGED)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"
    assert torch.equal(generate_dynamic(again, ids, mask), generate_dynamic(llama, ids, mask))


# Refusing --------------------------------------------------------------------------------------------------------


def test_a_model_with_attention_of_its_own_is_refused_by_name() -> None:
    xglm = tiny_model("xglm")
    before = state_of(xglm)
    with pytest.raises(NotImplementedError, match=r"(?s)XGLM\w*.*attention in its own code"):
        enable_paged_attention(xglm)
    with pytest.raises(NotImplementedError, match="XGLM"), paged_attention(xglm):
        pass
    assert state_of(xglm) == before


def test_a_model_that_is_refused_still_works_with_the_cache() -> None:
    xglm = tiny_model("xglm")
    ids, mask = random_prompts(RAGGED)
    for options in ({}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        torch.manual_seed(0)
        expected = generate_dynamic(xglm, ids, mask, max_new_tokens=20, **options)
        torch.manual_seed(0)
        actual = generate(xglm, ids, mask, PagedCache(xglm.config, block_size=4), max_new_tokens=20, **options)
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("thing", [None, "llama", 7, torch.nn.Linear(2, 2)], ids=["None", "str", "int", "Linear"])
def test_what_is_no_transformers_model_is_refused_by_type(thing: Any) -> None:
    for function in (enable_paged_attention, disable_paged_attention):
        with pytest.raises(TypeError, match=type(thing).__name__):
            function(thing)


def test_a_module_that_holds_a_model_is_taken_for_it(llama: PreTrainedModel) -> None:
    before = state_of(llama)
    wrapper = torch.nn.Sequential(llama)
    with paged_attention(wrapper) as same:
        assert same is wrapper
        assert llama.config._attn_implementation == IMPLEMENTATION
        ids, mask = random_prompts(RAGGED)
        cache = PagedCache(llama.config)
        generate(llama, ids, mask, cache, eos_token_id=list(range(1, VOCAB, 4)))
        assert sum(cache.row_lengths) < 3 * cache.get_seq_length()
    assert state_of(llama) == before


# The implementation by its name ------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("family", FAMILIES)
def test_loading_under_our_name_works_without_enabling(family: str, tmp_path: Any) -> None:
    plain = tiny_model(family)
    plain.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=IMPLEMENTATION).eval()
    made = AutoModelForCausalLM.from_config(copy.deepcopy(plain.config), attn_implementation=IMPLEMENTATION).eval()
    made.load_state_dict(plain.state_dict())
    ids, mask = random_prompts(RAGGED)
    expected = generate_dynamic(plain, ids, mask)
    for model in (loaded, made):
        assert model.config._attn_implementation == IMPLEMENTATION
        cache = PagedCache(model.config, block_size=4)
        same_tokens(plain, generate(model, ids, mask, cache), expected, mask)
        assert cache.row_lengths == [length + 11 for length in RAGGED]  # padding is not stored
        same_tokens(plain, generate_dynamic(model, ids, mask), expected, mask)
        with paged_attention(model):
            same_tokens(plain, generate(model, ids, mask, PagedCache(model.config)), expected, mask)
        assert model.config._attn_implementation == IMPLEMENTATION


# Without our cache -----------------------------------------------------------------------------------------------


def loss_and_gradients(model: PreTrainedModel, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), gradients


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("use_cache", [True, False])
def test_training_of_an_enabled_model_equals_itself_before(family: str, use_cache: bool) -> None:
    model = build_model(family)
    model.train()
    ids, mask = random_prompts(RAGGED)
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        # No loss where a pad is to say what follows: what a row of nothing but padding attends to is anybody's choice.
        "labels": ids.masked_fill((mask == 0) | (mask.cumsum(1) == 1), -100),
        "use_cache": use_cache,
    }
    loss, gradients = loss_and_gradients(model, **inputs)
    with paged_attention(model):
        enabled_loss, enabled_gradients = loss_and_gradients(model, **inputs)
    torch.testing.assert_close(enabled_loss, loss, rtol=1e-5, atol=1e-6)
    assert all(gradient.abs().sum() > 0 for gradient in gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(enabled_gradients[name], gradient, rtol=1e-3, atol=1e-4, msg=name)


def test_gradient_checkpointing_of_an_enabled_model() -> None:
    model = build_model("llama")
    model.train()
    ids, _ = random_prompts([12, 12])
    loss, gradients = loss_and_gradients(model, input_ids=ids, labels=ids, use_cache=False)
    model.gradient_checkpointing_enable()
    with paged_attention(model):
        again, others = loss_and_gradients(model, input_ids=ids, labels=ids, use_cache=False)
    torch.testing.assert_close(again, loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-3, atol=1e-4)


def test_dropout_of_attention_is_applied_when_training() -> None:
    model = build_model("llama", attention_dropout=0.5)
    ids, _ = random_prompts([12, 12])
    with paged_attention(model), torch.no_grad():
        model.train()
        torch.manual_seed(0)
        one, other = (model(input_ids=ids, use_cache=False).logits for _ in range(2))
        assert not torch.allclose(one, other)
        cached = [model(input_ids=ids, **{CACHE_ARGUMENT: PagedCache(model.config)}).logits for _ in range(2)]
        assert not torch.allclose(*cached)
        model.eval()
        one, other = (model(input_ids=ids, use_cache=False).logits for _ in range(2))
        assert torch.equal(one, other)


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_passes_without_our_cache_equal_those_before(family: str) -> None:
    model = tiny_model(family)
    ids, mask = random_prompts(RAGGED)

    def passes() -> list[torch.Tensor]:
        dynamic = DynamicCache(config=model.config)
        more = torch.cat((mask, torch.ones(3, 1, dtype=torch.long)), dim=1)
        with torch.no_grad():
            return [
                model(input_ids=ids).logits,
                model(input_ids=ids, attention_mask=mask, **{CACHE_ARGUMENT: dynamic}).logits[mask.bool()],
                model(input_ids=ids[:, :1], attention_mask=more, **{CACHE_ARGUMENT: dynamic}).logits,
            ]

    before = passes()
    with paged_attention(model):
        for ours, theirs in zip(passes(), before, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


# Soft caps and sinks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_soft_caps_and_sinks_equal_eager(family: str, way: str) -> None:
    model = tiny_model(family)
    ids, mask = random_prompts(RAGGED)
    expected = generate_dynamic(model, ids, mask, max_new_tokens=25)
    with run_way(model, way):
        actual = generate(model, ids, mask, PagedCache(model.config, block_size=4), max_new_tokens=25)
    same_tokens(model, actual, expected, mask)


@pytest.mark.parametrize("way", ENABLED_WAYS)
def test_soft_caps_and_sinks_make_a_difference_here(way: str) -> None:
    """The models of the test above would notice if soft caps or sinks were dropped."""
    ids, mask = random_prompts(RAGGED)
    for family in ("gemma2", "gpt_oss"):
        model = build_model(family)
        expected = generate_dynamic(model, ids, mask, max_new_tokens=25)
        if family == "gemma2":
            model = build_model(family, attn_logit_softcapping=None)
        else:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("sinks"):
                        parameter.fill_(-1e4)
        with run_way(model, way):
            assert not torch.equal(generate(model, ids, mask, PagedCache(model.config), max_new_tokens=25), expected)


def test_an_error_of_generate_itself_keeps_a_prompt_that_was_fed_before_enabling(llama: PreTrainedModel) -> None:
    ids, _ = random_prompts([6, 6])
    cache = PagedCache(llama.config)
    with torch.no_grad():
        llama(input_ids=ids, **{CACHE_ARGUMENT: cache})
    with paged_attention(llama):
        with pytest.raises(ValueError, match="nothing is left to feed"):
            llama.generate(ids, **{CACHE_ARGUMENT: cache})
        assert cache.row_lengths == [6, 6]
        with pytest.raises(ValueError, match="use_cache=False"):
            llama(input_ids=ids[:, :1], use_cache=False, **{CACHE_ARGUMENT: cache})
        assert cache.row_lengths == [6, 6]


def test_models_that_share_a_config_are_restored_in_any_order() -> None:
    model = build_model("llama")
    before = model.config._attn_implementation
    enable_paged_attention(model)
    enable_paged_attention(model.model)
    disable_paged_attention(model)
    disable_paged_attention(model.model)
    assert model.config._attn_implementation == before


def test_an_encoder_decoder_goes_on_from_decoder_ids() -> None:
    config = transformers.BartConfig(
        vocab_size=99, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config).eval()
    ids = torch.randint(5, 90, (2, 4))
    options = {"do_sample": False, "eos_token_id": 98}

    def two_turns(first: Any) -> torch.Tensor:
        cache = transformers.EncoderDecoderCache(first, DynamicCache())
        begun = model.generate(ids, max_new_tokens=6, **options, **{CACHE_ARGUMENT: cache})
        return model.generate(ids, decoder_input_ids=begun, max_new_tokens=6, **options, **{CACHE_ARGUMENT: cache})

    expected = two_turns(DynamicCache())
    with paged_attention(model):
        assert two_turns(PagedCache(config)).equal(expected)


@pytest.mark.parametrize("family", ["T5", "UMT5"])
@pytest.mark.parametrize("seed", [0, 5])
def test_models_that_look_at_the_shape_of_the_cached_keys_see_all_of_it(family: str, seed: int) -> None:
    """T5 makes its relative position bias as long as the keys that it got from the cache."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=128, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0,
        initializer_factor=3.0,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    options = {"input_ids": torch.randint(3, 128, (1, 12)), "max_new_tokens": 20, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(**options)
    with paged_attention(model):
        cache = transformers.EncoderDecoderCache(PagedCache(config, num_blocks=64), DynamicCache())
        actual = model.generate(**options, **{CACHE_ARGUMENT: cache})
    assert actual.sequences.equal(expected.sequences)
    for ours, theirs in zip(actual.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_an_encoder_decoder_with_a_bare_cache_says_first_what_to_pass() -> None:
    config = transformers.T5Config(
        vocab_size=128, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    with paged_attention(model), pytest.raises(RuntimeError, match=r"^this is an encoder-decoder model"):
        model.generate(torch.randint(3, 128, (1, 12)), max_new_tokens=4, **{CACHE_ARGUMENT: PagedCache(config)})


def test_an_implementation_set_while_enabled_stores_rows_that_ended_too(llama: PreTrainedModel) -> None:
    ids, mask = random_prompts(RAGGED)
    options = {"max_new_tokens": 30, "eos_token_id": list(range(3, 60))}
    expected = generate_dynamic(llama, ids, mask, **options)
    with paged_attention(llama):
        llama.set_attn_implementation("eager")
        actual = generate(llama, ids, mask, PagedCache(llama.config), **options)
    assert actual.equal(expected)


@pytest.mark.parametrize("enabled", [False, True])
def test_a_compiled_model_gives_the_same_around_the_cache(enabled: bool) -> None:
    llama = build_model("llama")
    ids, _ = random_prompts([12])
    cache = PagedCache(llama.config, num_blocks=32)
    torch._dynamo.reset()
    with torch.no_grad(), paged_attention(llama) if enabled else contextlib.nullcontext():
        expected = llama(input_ids=ids).logits
        compiled = torch.compile(llama, backend="eager")
        parts = [compiled(input_ids=part, **{CACHE_ARGUMENT: cache}).logits for part in ids.split([7, 4, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=2e-4, rtol=1e-4)
    torch._dynamo.reset()
