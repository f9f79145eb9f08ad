"""Tiny random models of any type.

A config is made from the defaults of its class: sizes shrink by the names of their attributes, lists with an item for
every layer are worked out again by the class, and every kind of layer stays. `special.py` has what goes by no rule.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.timm_wrapper.modeling_timm_wrapper import TimmWrapperModel

from hf_paged.sweep.special import ATTRIBUTES, COMPOSED

MAPPINGS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
VOCAB = 256
FIRST_SPECIAL = 200
"""Ids of images, sounds and the like lie from here on, above every id of a prompt."""
MAX_PARAMETERS = 30_000_000
LAYERS = (2, 3, 4, 5, 6, 8)
"""Numbers of layers that are tried, until every kind is there."""

# The first rule whose pattern is the whole name gives the size.
RULES: list[tuple[str, Any]] = [
    (r"vocab_size_per_layer_input|.*vocab_size|unpadded_vocab_size", VOCAB),
    (r"n_routed_experts|(moe_)?num_experts|num_local_experts|n_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_top_?k|moe_k|top_k_experts", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"num_nextn_predict_layers|num_mtp_layers", 0),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank|.*_rank", 32),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|swa_v_head_dim", 16),
    (r"qk_head_dim", 32),
    (r"index_head_dim|global_head_dim|cross_head_dim|.*head_dim|d_kv|kv_channels|dim_head|mamba_d_head", 16),
    (r"index_n_heads", 4),
    (r"index_topk", 8),
    (r".*(num_key_value_heads|num_kv_heads)|kv_n_heads|num_global_key_value_heads", "kv_heads"),
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads|linear_num_heads", 4),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r".*(attention_heads|n_heads?|num_heads|resampler_heads)", 4),
    (r"mamba_d_state|state_size|ssm_state_size", 16),
    (r".*chunk_size", 16),
    (r"sliding_window|sliding_window_size|attention_window_size", 8),
    (r"attention_chunk_size", 8),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|.*max_position_embeddings", 128),
    (r"max_(source|target)_positions", 128),
    (r"rotary_dim", 8),
    (r"num_position_embeddings", 64),
    (r"(.*_)?intermediate_size.*|.*ffn_dim|d_ff|dff|dim_ff|ffn_hidden_size|n_inner|mlp_dim|moe_ffn_hidden_size", 96),
    (r"num_patches|num_query_tokens|latent_query_num|resampler_n_latents|resampler_num_latents|num_image_tokens", 4),
    (r"image_seq_length|video_seq_length|mm_tokens_per_image|img_max_token_num", 4),
    (r"qformer_hidden_size|.*hidden_size(_global)?|d_model|n_embd|.*embed_dim|.*embedding_size|projection_dim", 64),
    (r"word_embed_proj_dim|.*output_dim|out_dim|dim|hidden_dim|width|decoder_hidden_size|lru_width", 64),
    (r"hidden_size_per_layer_input", 16),
    (r"num_conv_pos_embeddings", 16),
    (r"base_channels|latent_channels|output_channels|num_filters", 32),
    (r"max_vit_seq_len|max_num_patches", 64),
]
LAYER_RULE = (
    r"(.*_)?num_(hidden_)?layers|n_layers?|num_decoder_layers|(.*_)?(encoder|decoder)_layers|depth|layers|num_blocks"
)
TOKEN_RULE = r".*_token_(id|index)|im_(start|end|newline)_id"
WIDTHS = {"initializer_range": 0.2, "init_std": 0.2}
WHERE_NONE = {
    "head_dim": 16,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}
"""What some classes leave to the checkpoint."""
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 2, "eos_token_id": None}


def pairs() -> list[tuple[str, str, str]]:
    """`(mapping, model type, class name)` for all of them, in the order of the mappings."""
    found: dict[tuple[str, str], str] = {}
    for mapping in MAPPINGS:
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault((model_type, name), mapping)
    return [(mapping, model_type, name) for (model_type, name), mapping in found.items()]


def tiny_config(model_type: str, class_name: str, mapping: str) -> PreTrainedConfig:
    """A small config whose model has every kind of layer that the defaults have."""
    if model_type in COMPOSED:
        parts = {
            name: _shrink(CONFIG_MAPPING[kind](), 2, **extra) for name, (kind, extra) in COMPOSED[model_type].items()
        }
        return CONFIG_MAPPING[model_type](**parts, **TOKENS)
    config_class = _class_of(class_name).config_class
    overrides = _special(model_type, class_name)
    default = CONFIG_MAPPING[model_type](**overrides.get("__init__", {}))
    if config_class is not None and not isinstance(default, config_class):
        inner = ((name, value) for name, value in vars(default).items() if isinstance(value, config_class))
        name, default = next(inner, ("", None))
        default = default or config_class()
        overrides = overrides.get(f"{name}.", {})
    wanted = layer_kinds(default)
    if mapping == "CAUSAL_LM" and hasattr(default, "is_decoder") and not default.is_encoder_decoder:
        overrides = {"is_decoder": True} | overrides
    config = None
    for layers in LAYERS:
        config = _shrink(default, layers, **overrides)
        if set(layer_kinds(config)) >= set(wanted):
            break
    else:
        _say_kinds(config, wanted)
    return config


def _special(model_type: str, class_name: str) -> dict[str, Any]:
    return ATTRIBUTES.get(model_type, {}) | ATTRIBUTES.get(class_name, {})


def layer_kinds(config: PreTrainedConfig) -> list[str]:
    """The kinds of a decoder's layers as transformers' caches see them."""
    try:
        return list(get_layer_types_and_kwargs(config.get_text_config(decoder=True))[0])
    except Exception:  # what has no layers of a known form still may generate
        return []


def _say_kinds(config: PreTrainedConfig, wanted: list[str]) -> None:
    decoder = config.get_text_config(decoder=True)
    if getattr(decoder, "layer_types", None):
        kinds = list(dict.fromkeys(wanted))
        decoder.layer_types = [kinds[i % len(kinds)] for i in range(decoder.num_hidden_layers)]


def _shrink(default: PreTrainedConfig, layers: int, **overrides: Any) -> PreTrainedConfig:
    ids = itertools.count(FIRST_SPECIAL)
    return _shrink_part(default, layers, overrides, ids)


def _shrink_part(
    default: PreTrainedConfig, layers: int, overrides: dict[str, Any], ids: itertools.count
) -> PreTrainedConfig:
    cls = type(default)
    fields = {field.name: field for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    before = _number_of_layers(default)
    field_of = {stored: name for name, stored in getattr(cls, "attribute_map", {}).items() if name in fields}
    kwargs: dict[str, Any] = {}
    for name, value in vars(default).items():
        name = name if name in fields else field_of.get(name, name)
        if name in overrides or name.startswith("__"):
            continue
        if isinstance(value, PreTrainedConfig):
            kwargs[name] = _shrink_part(value, layers, overrides.get(f"{name}.", {}), ids)
        elif name not in fields and fields:
            continue
        elif name in TOKENS:
            kwargs[name] = TOKENS[name]
        elif name.startswith("forced_"):
            kwargs[name] = None
        elif isinstance(value, list | tuple) and before and len(value) == before:
            if not _is_worked_out(fields.get(name)):
                kwargs[name] = type(value)(value[:layers])
        elif name in WIDTHS:
            kwargs[name] = WIDTHS[name]
        elif isinstance(value, int) and not isinstance(value, bool):
            small = _small(name, value, default, layers, ids)
            if small != value or _was_set(fields.get(name), value):
                kwargs[name] = small
        elif isinstance(value, bool | float | str) and _was_set(fields.get(name), value):
            kwargs[name] = value
        elif name == "rope_parameters" and isinstance(value, dict):
            kwargs[name] = _small_rope(value, "mrope_section" in getattr(cls, "ignore_keys_at_rope_validation", ()))
        elif value is None and name in WHERE_NONE:
            kwargs[name] = WHERE_NONE[name]
    kwargs.update({name: value for name, value in overrides.items() if not name.endswith((".", "__"))})
    try:
        return cls(**kwargs)
    except Exception as error:
        if "eos_token_id" not in str(error):
            raise
        return cls(**kwargs | {"eos_token_id": VOCAB - 1})  # some insist on one


def _small(name: str, value: int, config: PreTrainedConfig, layers: int, ids: itertools.count) -> int:
    if re.fullmatch(TOKEN_RULE, name):
        return next(ids)
    if re.fullmatch(LAYER_RULE, name):
        return min(value, layers)
    if name == "image_size" and isinstance(getattr(config, "patch_size", None), int):
        return min(value, 4 * config.patch_size)
    for pattern, small in RULES:
        if re.fullmatch(pattern, name):
            if small == "kv_heads":
                heads = vars(config).get("num_attention_heads") or value
                return 1 if value == 1 else 4 if value == heads else 2
            return small if name in ("sliding_window", "attention_chunk_size") else min(value, small)
    return value


def _small_rope(rope: dict[str, Any], has_sections: bool) -> dict[str, Any]:
    if any(isinstance(value, dict) for value in rope.values()):
        return {
            name: _small_rope(value, has_sections) if isinstance(value, dict) else value for name, value in rope.items()
        }
    kept = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
    for name in ("partial_rotary_factor", "mrope_interleaved", "llama_4_scaling_beta"):
        if name in rope:
            kept[name] = rope[name]
    if "llama_4_scaling_beta" in rope:
        kept["original_max_position_embeddings"] = 8
    if (has_sections and "rope_type" in rope) or "mrope_section" in rope:
        kept["mrope_section"] = [2, 1, 1] if rope.get("partial_rotary_factor") == 0.5 else [2, 3, 3]
    return kept


def _number_of_layers(config: PreTrainedConfig) -> int | None:
    for name in ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers"):
        value = vars(config).get(name)
        if isinstance(value, int):
            return value
    return None


def _is_worked_out(field: dataclasses.Field | None) -> bool:
    return field is None or field.default is None


def _was_set(field: dataclasses.Field | None, value: Any) -> bool:
    """Whether a part has another value than its class gives it: the whole has set it."""
    return field is not None and field.default not in (None, dataclasses.MISSING) and field.default != value


def _class_of(name: str) -> type[PreTrainedModel]:
    return getattr(transformers, name)


@contextlib.contextmanager
def _without_timm() -> Iterator[None]:
    """Within, a tower of timm's is an empty module: no image reaches it."""
    with mock.patch.object(TimmWrapperModel, "__init__", PreTrainedModel.__init__):
        yield


def build(model_type: str, class_name: str, mapping: str) -> PreTrainedModel:
    """A random model in float32, the same one at every call.

    Raises:
        ValueError: it is not tiny; the message names the largest weights.
    """
    config = tiny_config(model_type, class_name, mapping)
    model_class = _class_of(class_name)
    try:
        with _without_timm(), torch.device("meta"):
            sizes = {name: p.numel() for name, p in model_class(config).named_parameters()}
    except Exception:  # some cannot be built without memory
        sizes = {}
    if sum(sizes.values()) > MAX_PARAMETERS:
        largest = sorted(sizes, key=sizes.get)[-3:]
        raise ValueError(f"not tiny: {sum(sizes.values()):,} parameters, {', '.join(largest)} the largest")
    torch.manual_seed(0)
    with _without_timm():
        model = model_class(config).eval().float()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and not parameter.any():  # nothing would come through
            torch.nn.init.normal_(parameter, std=0.2)
        if "sink" in name.rsplit(".", 1)[-1]:
            torch.nn.init.normal_(parameter, mean=1.0)
    settings = model.generation_config
    for name in (
        "eos_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "suppress_tokens",
        "begin_suppress_tokens",
    ):
        setattr(settings, name, None)
    settings.pad_token_id = 0
    if getattr(settings, "decoder_start_token_id", None) is None:
        settings.decoder_start_token_id = TOKENS["decoder_start_token_id"]
    for name, value in _special(model_type, class_name).get("generation.", {}).items():
        setattr(settings, name, value)
    return model
