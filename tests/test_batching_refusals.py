"""What continuous batching refuses: requests, prompts and models whose tokens would not be those of generate()."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GenerationConfig

from hf_paged import IMPLEMENTATION, ContinuousBatcher, RequestTooLongError
from hf_paged.models import cache_keyword
from hf_paged.sweep.tiny import build
from tests.batching_checks import alone, assert_alone, prompts, refused
from tests.helpers import VOCAB, build_model, tiny_model

REFUSED = (
    ({"num_beams": 4}, "num_beams=4"),
    ({"assistant_model": tiny_model("llama", seed=1)}, "assistant_model="),
    ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
    ({"assistant_early_exit": 2}, "assistant_early_exit=2"),
    ({"is_assistant": True}, "is_assistant=True"),
    ({"use_mtp": True}, "use_mtp=True"),
    ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
    ({"output_scores": True}, "output_scores=True"),
    ({"return_dict_in_generate": True}, "return_dict_in_generate=True"),
    ({"cache_implementation": "static"}, "cache_implementation='static'"),
    ({"use_cache": False}, "use_cache=False"),
    ({"token_healing": True}, "token_healing=True"),
    ({"pixel_values": torch.zeros(1)}, "pixel_values="),
    ({"attention_mask": torch.ones(1, 3)}, "attention_mask="),
    ({"custom_generate": "some/repo"}, "custom_generate="),
    ({"generation_config": GenerationConfig(num_beams=2)}, "num_beams=2"),
)


@pytest.mark.parametrize(("options", "name"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_honoured_is_refused_by_name(options, name):
    with ContinuousBatcher(tiny_model("llama"), num_blocks=16) as batcher:
        with pytest.raises(NotImplementedError) as caught:
            batcher.submit([1, 2, 3], **options)
        assert name in str(caught.value) and "model.generate(" in str(caught.value)
        assert batcher.is_idle


def test_what_generate_refuses_is_refused():
    with ContinuousBatcher(tiny_model("llama"), num_blocks=16) as batcher:
        with pytest.raises(ValueError, match="num_return_sequences"):
            batcher.submit([1, 2], num_return_sequences=3)  # greedily
        with pytest.raises(ValueError, match="tokenizer"):
            batcher.submit([1, 2], stop_strings=["x"])
        with pytest.raises(TypeError, match=r"max_new_token= is not known; did you mean max_new_tokens="):
            batcher.submit([1, 2], max_new_token=1)
        for prompt in (3, [[1, 2]], [1.5], ["a"]):
            with pytest.raises(TypeError, match="a prompt is a list of token ids"):
                batcher.submit(prompt)


@pytest.mark.parametrize(
    ("prompt", "message"),
    (([], "empty"), ("text", "tokenizer"), ([1, VOCAB], "does not know"), ([-1], "does not know")),
    ids=("empty", "text", "too large", "negative"),
)
def test_prompts_that_are_none(prompt, message):
    with ContinuousBatcher(tiny_model("llama"), num_blocks=16) as batcher:
        with pytest.raises(ValueError, match=message):
            batcher.submit(prompt)
        for tensor in (torch.zeros(2, 3, dtype=torch.long), torch.zeros(3)):
            with pytest.raises(ValueError, match="one row"):
                batcher.submit(tensor)
        assert batcher.submit(torch.tensor([[4, 5]]), max_new_tokens=2).prompt_ids == [4, 5]


def test_a_request_that_can_never_fit_fails_at_once_and_the_others_go_on():
    model = tiny_model("llama")
    with ContinuousBatcher(model, num_blocks=8, block_size=4) as batcher:
        fits = batcher.submit([1, 2, 3], max_new_tokens=8)
        batcher.step()
        with pytest.raises(RequestTooLongError, match="max_new_tokens"):
            batcher.submit([1, 2, 3], max_new_tokens=31)
        assert_alone(model, fits, max_new_tokens=8)


def test_positions_that_the_model_does_not_have_are_refused():
    model = build_model("gpt2", n_positions=32)
    with ContinuousBatcher(model, num_blocks=64) as batcher:
        assert len(batcher.submit([1, 2], max_new_tokens=30).result().tokens) == 30
        with pytest.raises(NotImplementedError, match="beyond 32"):
            batcher.submit([1, 2], max_new_tokens=31)


@pytest.mark.parametrize("kind", ("dynamic", "longrope"))
def test_rotary_frequencies_that_depend_on_the_longest_row(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {"long_factor": [2.0] * 8, "short_factor": [1.0] * 8, "original_max_position_embeddings": 32}
    model = build_model("llama", max_position_embeddings=32, rope_parameters=rope)
    with ContinuousBatcher(model, num_blocks=64) as batcher:
        handle = batcher.submit([1, 2], max_new_tokens=30)
        with pytest.raises(NotImplementedError, match="rotary frequencies"):
            batcher.submit([1, 2], max_new_tokens=31)
        assert_alone(model, handle, max_new_tokens=30)


@pytest.mark.parametrize("family", ("qwen3_next", "falcon_h1"))
def test_models_with_states_are_refused(family):
    model = build_model(family)
    with pytest.raises(NotImplementedError, match="states would run from one row into the next"):
        ContinuousBatcher(model, num_blocks=16)
    assert model.config._attn_implementation != IMPLEMENTATION


def test_a_model_whose_tokens_do_not_keep_to_themselves_is_refused():
    model = build_model("llama")

    def leak(module, args, output):
        return output + 0.1 * output.roll(1, dims=1)

    model.model.layers[0].mlp.register_forward_hook(leak)
    with pytest.raises(NotImplementedError, match="do not keep to their own sequence"):
        ContinuousBatcher(model, num_blocks=16)


def test_training_mode_is_refused():
    model = build_model("llama").train()
    with pytest.raises(NotImplementedError, match="eval"):
        ContinuousBatcher(model, num_blocks=16)


@pytest.mark.parametrize("error", (TypeError, ValueError, RuntimeError, AttributeError, KeyError, AssertionError))
@pytest.mark.parametrize("alone", (True, False))
def test_an_error_from_inside_the_model_is_a_refusal_that_tells_it(error, alone):
    model = build_model("llama")

    def fail(module, args, kwargs):
        if alone or kwargs.get(cache_keyword(model)) is not None:
            raise error("no such\n    thing")

    model.model.layers[1].self_attn.register_forward_pre_hook(fail, with_kwargs=True)
    doing = "does not run with tokens alone" if alone else "fails when several sequences are fed side by side"
    assert isinstance(refused(model, f"{doing}.*{error.__name__}.*no such.*thing"), error)


def test_a_machine_without_memory_is_no_model_that_cannot_be_batched():
    model = build_model("llama")

    def fail(module, args):
        raise torch.OutOfMemoryError("none left")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        ContinuousBatcher(model, num_blocks=16)
    hook.remove()
    with ContinuousBatcher(model, num_blocks=16) as batcher:
        assert_alone(model, batcher.submit([1, 2, 3], max_new_tokens=3), max_new_tokens=3)


def behaving(model, forward) -> None:
    """Let the model's second attention call `forward(its own, cache, keyword arguments)`, in packed steps alone."""
    attention = model.model.layers[1].self_attn
    own = attention.forward

    def instead(*args, **kwargs):
        cache = kwargs.get(cache_keyword(model))
        return own(*args, **kwargs) if cache is None else forward(lambda **more: own(*args, **(kwargs | more)), cache)

    attention.forward = instead


def test_a_layer_that_stores_twice_in_a_step_is_refused():
    """Its second keys would take the place of the first: a little wrong, which no comparison need notice."""
    model = build_model("llama")

    def twice(own, cache):
        own()
        return own()

    behaving(model, twice)
    refused(model, "stores keys and values more than once")


@pytest.mark.parametrize("options", [{"max_step_tokens": 0}, {"max_rows": 0}, {"max_rows": None}, {"max_rows": True}])
def test_sizes_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be an integer of at least 1"):
        ContinuousBatcher(tiny_model("llama"), num_blocks=16, **options)


@pytest.mark.parametrize("options", [{"priority": "high"}, {"seed": "x"}, {"seed": 1.5, "do_sample": True}])
def test_priorities_and_seeds_are_integers(options):
    with ContinuousBatcher(tiny_model("llama"), num_blocks=16) as batcher:
        with pytest.raises(TypeError, match=f"{next(iter(options))} must be an integer, not"):
            batcher.submit([1, 2], max_new_tokens=2, **options)
        assert batcher.submit([1, 2], max_new_tokens=2).result().tokens
        assert repr(batcher).startswith("ContinuousBatcher(0 running, 0 waiting, BlockPool(")
    assert repr(batcher).startswith("ContinuousBatcher(closed, ")


def test_attention_past_the_cache_is_refused():
    """It would see the other sequences."""
    model = build_model("llama")
    behaving(model, lambda own, cache: own(**{cache_keyword(model): None}))
    refused(model, "attends to keys that are not in the cache")


def test_reading_and_copying_layers_of_the_cache_is_refused():
    model = build_model("llama")
    behaving(model, lambda own, cache: (cache.layers[0].keys, own())[1])
    refused(model, "reads keys and values out of the cache")
    model = build_model("llama")
    behaving(model, lambda own, cache: (copy.deepcopy(cache.layers[0]), own())[1])
    refused(model, "adds copies of layers")


def test_masks_that_reach_no_layer_are_no_reason_and_one_that_does_is():
    """Models make masks for kinds of layers that they may have."""
    for model_type, name in (("qwen2_moe", "Qwen2MoeForCausalLM"), ("ministral", "MinistralForCausalLM")):
        model = build(model_type, name, "CAUSAL_LM")
        with ContinuousBatcher(model, num_blocks=16) as batcher:
            assert_alone(model, batcher.submit([4, 5, 6], max_new_tokens=12), max_new_tokens=12)
    refused(build("moshi", "MoshiForCausalLM", "CAUSAL_LM"), "masks say more than causal order|no kernel expresses")


def test_a_models_own_use_cache_false_is_no_wish_of_the_request():
    model = build_model("mpt")
    model.generation_config.use_cache = False  # as MPT's configs say
    with ContinuousBatcher(model, num_blocks=16) as batcher:
        assert_alone(model, batcher.submit([4, 5, 6], max_new_tokens=4), max_new_tokens=4)
        with pytest.raises(NotImplementedError, match="use_cache=False"):
            batcher.submit([4, 5, 6], generation_config=GenerationConfig(use_cache=False))


def test_sinusoidal_positions_end_as_well():
    with (
        ContinuousBatcher(build("ctrl", "CTRLLMHeadModel", "CAUSAL_LM"), num_blocks=16) as batcher,
        pytest.raises(NotImplementedError, match="beyond 128"),
    ):
        batcher.submit([1, 2, 3], max_new_tokens=126)


def test_what_a_model_says_of_its_own_caching_is_no_wish_of_the_request():
    model, [prompt] = build_model("llama"), prompts(7)
    expected = alone(model, prompt, max_new_tokens=4)
    model.generation_config.cache_implementation = "hybrid"
    with ContinuousBatcher(model, num_blocks=16) as batcher:
        assert batcher.submit(prompt, max_new_tokens=4).result().tokens == expected
        with pytest.raises(NotImplementedError, match="cache_implementation='hybrid'"):
            batcher.submit(prompt, cache_implementation="hybrid")
