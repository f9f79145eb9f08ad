"""What we rely on in transformers. A release that changes it fails here, in one place, and says what."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import transformers
from packaging.version import Version
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    get_layer_types_and_kwargs,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, create_masks_for_generate, sdpa_mask

from hf_paged import IMPLEMENTATION, PagedCache
from hf_paged.attention import paged_attention_forward
from hf_paged.layer import PagedLayer
from hf_paged.layer_kinds import HYBRID_KINDS, PAGED_KINDS, STATE_KINDS
from hf_paged.masks import paged_mask
from hf_paged.patches.generation import _REPLACEMENTS

pytestmark = pytest.mark.smoke

VERSION = Version(transformers.__version__)
NEWEST_SEEN = Version("5.24.0")
ONLY_BEFORE = {"get_max_cache_shape", "max_batch_size", "max_cache_len"}
"""Names that newer versions have dropped."""

INHERITED = {
    "activate_past_recording": "each layer's",
    "early_initialization": "for layers of a known shape; blocks are made when they are first stored into",
    "get_conv_state": "of layers that are transformers' own",
    "get_recurrent_state": "of layers that are transformers' own",
    "get_mask_sizes": "the layer's",
    "get_max_cache_shape": "the layer's",
    "get_max_length": "the layer's",
    "get_seq_length": "the layer's",
    "has_previous_state": "of layers that are transformers' own",
    "is_croppable": "each layer's",
    "is_dummy": "each layer's",
    "is_initialized": "each layer's",
    "is_linear": "each layer's",
    "is_recording_past": "each layer's",
    "is_sliding": "each layer's",
    "max_batch_size": "another name",
    "max_cache_len": "another name",
    "offload": "refused by the layers",
    "prefetch": "refused by the layers",
    "update_conv_state": "of layers that are transformers' own",
    "update_indexer": "of layers of kinds that are refused",
    "update_recurrent_state": "of layers that are transformers' own",
}
"""Methods of `Cache` that PagedCache has from it, and why."""


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def renamed(names: str) -> list[str]:
    """Names of parameters; `cache` was `past_key_values` before."""
    is_old = "past_key_values" in parameters(create_causal_mask)
    return ["past_key_values" if name == "cache" and is_old else name for name in names.split()]


def test_every_method_of_a_cache_is_ours_or_inherited_for_a_reason() -> None:
    ours = {name for name in public(Cache) if name in vars(PagedCache)}
    assert public(Cache) == ours | (set(INHERITED) & public(Cache)), "a method that PagedCache was not looked at for"
    assert not ours & set(INHERITED)
    gone = set(INHERITED) - public(Cache)
    if VERSION >= NEWEST_SEEN:
        assert gone <= ONLY_BEFORE, "a method that transformers has dropped"


def test_every_method_of_a_layer_is_known() -> None:
    known = {
        *("get_mask_sizes", "get_max_cache_shape", "get_max_length", "get_seq_length", "is_compileable"),
        *("is_croppable", "lazy_initialization", "offload", "prefetch", "reorder_cache", "reset"),
        *("supports_early_init", "update"),
    }
    assert public(CacheLayerMixin) <= known, "a method that PagedLayer was not looked at for"
    needed = known - {"get_max_cache_shape", "supports_early_init"}
    assert needed <= public(CacheLayerMixin)
    assert needed <= public(PagedLayer)


@pytest.mark.parametrize("name", ["update", "get_mask_sizes", "get_query_offset", "get_seq_length", "crop", "reset"])
def test_methods_take_what_transformers_passes(name: str) -> None:
    assert parameters(getattr(PagedCache, name)) == parameters(getattr(Cache, name))


def test_kinds_of_layers() -> None:
    refused = {
        *("deepseek_sparse_attention", "hybrid_sliding", "indexed_attention", "qwen_sparse_attention"),
        *("mlp", "moe"),
    }
    assert set(DYNAMIC_LAYER_TYPE_MAPPING) <= {*PAGED_KINDS, *HYBRID_KINDS, *STATE_KINDS, *refused}, (
        "a kind of layer that is not known"
    )
    assert set(PAGED_KINDS) <= set(DYNAMIC_LAYER_TYPE_MAPPING)
    assert parameters(get_layer_types_and_kwargs) == ["config"]


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (sdpa_attention_forward, "module query key value attention_mask dropout scaling is_causal"),
        (
            sdpa_mask,
            "batch_size q_length kv_length q_offset kv_offset mask_function attention_mask local_size "
            "allow_is_causal_skip allow_is_bidirectional_skip use_vmap device",
        ),
        (
            create_masks_for_generate,
            "config inputs_embeds attention_mask cache position_ids or_mask_function block_sequence_ids kwargs",
        ),
        (create_causal_mask, "config inputs_embeds attention_mask cache position_ids or_mask_function"),
        (GenerationMixin._get_stopping_criteria, "self generation_config stopping_criteria"),
        (GenerationMixin._expand_inputs_for_generation, "expand_size is_encoder_decoder input_ids model_kwargs"),
        (GenerationMixin._prefill, "self input_ids generation_config model_kwargs is_first_iteration"),
        (GenerationMixin._valid_auto_compile_criteria, "self model_kwargs generation_config"),
        (GenerationMixin._update_model_kwargs_for_generation, "self outputs model_kwargs is_encoder_decoder"),
        (GenerationMixin.prepare_inputs_for_generation, "self input_ids next_sequence_length cache attention_mask"),
        (PreTrainedModel.get_compiled_call, "self compile_config"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_functions_take_what_we_pass_and_pass_what_we_take(function: Callable[..., Any], names: str) -> None:
    there = parameters(function)
    missing = [name for name in renamed(names) if name not in there]
    assert not missing, f"{function.__qualname__} is {inspect.signature(function)}"


def test_our_functions_are_called_as_sdpa_is() -> None:
    assert parameters(paged_attention_forward)[:8] == parameters(sdpa_attention_forward)[:8]
    assert AttentionInterface()[IMPLEMENTATION] is paged_attention_forward
    assert AttentionMaskInterface()[IMPLEMENTATION] is paged_mask


@pytest.mark.parametrize("name", sorted(_REPLACEMENTS))
def test_what_an_enabled_model_overrides_is_there(name: str) -> None:
    assert hasattr(PreTrainedModel, name) or hasattr(GenerationMixin, name)
