"""A model's figures, found by running it on torch's meta device: shapes without memory, a second even for the largest.

Nothing is known here of heads, latents or shared layers. The model's own code hands its keys and values to a cache,
and their shapes are read off.
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache, PreTrainedConfig

from hf_paged.cache import PagedCache
from hf_paged.capacity.footprint import Footprint, GroupFootprint
from hf_paged.models import ModelLoadError, beginning, cache_keyword, quiet
from hf_paged.pool import LayerGroup

IMPLEMENTATIONS = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
"""Those that never look at a value, which there is none of on the meta device."""


def load_config(name_or_path: str | Path) -> PreTrainedConfig:
    """The config of a hub id, of a folder with a `config.json`, or of a JSON file. Weights are not touched.

    Raises:
        ModelLoadError: there is none, or this transformers does not know the type of model.
    """
    path = Path(name_or_path).expanduser()
    looks_like_a_path = path.is_absolute() or str(name_or_path).startswith((".", "~")) or path.suffix == ".json"
    if looks_like_a_path and not path.exists():
        raise ModelLoadError(f"Cannot read a config from {path}: there is no such file or folder.")
    try:
        if path.is_file():
            values = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict) or "model_type" not in values:
                raise ValueError("the file holds no 'model_type', so it is no config of a transformers model")
            return AutoConfig.for_model(**values)
        if path.is_dir() and not (path / "config.json").is_file():
            raise ValueError("the folder holds no config.json")
        with quiet(hub=False):
            return AutoConfig.from_pretrained(path if path.is_dir() else str(name_or_path), trust_remote_code=False)
    except Exception as error:  # whatever a config's class raises about values that are none of its kind
        raise ModelLoadError(
            f"Cannot read the config of '{name_or_path}': {beginning(error)}\n"
            "MODEL is a hub id (with network access), a folder with a config.json, or a JSON file with a config; "
            "--kv-bytes-per-token does without one."
        ) from error


def footprint_of(config: PreTrainedConfig, dtype: torch.dtype | None = None) -> Footprint:
    """What a model of this config takes, in bytes, by running it on the meta device.

    Args:
        config: of a causal language model, or of one that sees images, too. It is left as it is.
        dtype: of weights, keys and values; by default the config's, else bfloat16.

    Raises:
        NotImplementedError: the model cannot be paged, has an encoder, or does not run on the meta device.
    """
    kind = config.model_type
    if config.is_encoder_decoder:
        raise NotImplementedError(
            f"{kind} has an encoder and a decoder, which keep keys of two kinds; give --kv-bytes-per-token instead"
        )
    groups = _groups_of(config)
    config = copy.deepcopy(config)
    decoder = config.get_text_config(decoder=True)
    dtype = dtype or _dtype_of(config) or _dtype_of(decoder) or torch.bfloat16
    failure: Exception | None = None
    # What sees images may want some, or libraries that are not here; its text part does not.
    for part in (config,) if decoder is config else (config, decoder):
        try:
            model, cache = _run(part, dtype)
            break
        except Exception as error:  # whatever a model's code raises
            failure = failure or error
    else:
        raise _cannot_count(kind, failure)
    is_whole = part is config
    per_layer = {index: _stored_bytes(layer) for index, layer in enumerate(cache.layers)}
    stored = [nbytes for nbytes in per_layer.values() if nbytes]
    if not stored:
        raise NotImplementedError(f"{kind} handed nothing to its cache; give --kv-bytes-per-token instead")
    return Footprint(
        tuple(
            GroupFootprint(
                group.kind,
                group.window,
                sum(1 for layer in group.layers if per_layer[layer]),
                sum(per_layer[layer] for layer in group.layers),
            )
            for group in groups
        ),
        state_bytes=sum(map(_state_bytes, cache.layers)),
        first_layer_bytes=stored[0],
        model=config.name_or_path or kind,
        dtype=str(dtype).removeprefix("torch."),
        parameters=sum(parameter.numel() for parameter in model.parameters()) if is_whole else None,
        weight_bytes=_weight_bytes(model) if is_whole else None,
        is_quantized=getattr(config, "quantization_config", None) is not None,
        max_positions=getattr(decoder, "max_position_embeddings", None),
    )


def _groups_of(config: PreTrainedConfig) -> tuple[LayerGroup, ...]:
    try:
        return PagedCache(config, num_blocks=1).pool.groups
    except NotImplementedError:
        raise
    except Exception as error:  # a config that says nothing of layers
        raise _cannot_count(config.model_type, error)  # noqa: B904  it names its cause


def _cannot_count(kind: str, error: Exception | None) -> NotImplementedError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    refusal = NotImplementedError(
        f"{kind} does not run without memory, so its keys and values cannot be counted ({reason}); give "
        "--kv-bytes-per-token instead"
    )
    refusal.__cause__ = error
    return refusal


def _dtype_of(config: PreTrainedConfig) -> torch.dtype | None:
    dtype = getattr(config, "dtype", None)
    return getattr(torch, dtype, None) if isinstance(dtype, str) else dtype


def _build(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    for name in config.architectures or ():
        model_class = getattr(transformers, name, None)
        if model_class is not None and hasattr(model_class, "generate"):
            return model_class._from_config(config, dtype=dtype, **IMPLEMENTATIONS)
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM):  # what sees images may map to its text part, too
        if type(config) in auto._model_mapping:
            return auto.from_config(config, dtype=dtype, **IMPLEMENTATIONS)
    raise NotImplementedError("transformers knows no class of this type that generates text")


def _run(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[Any, DynamicCache]:
    """A model without memory, and the ordinary cache after one token of it."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            model = _build(config, dtype).eval()
        return model, _fill(model, config)


@torch.no_grad()
def _fill(model: Any, config: PreTrainedConfig) -> DynamicCache:
    """What a forward pass makes without naming a device must be without values in most models, beside everything else,
    and have some in those that look at it (Gemma 3n's constants).
    """
    ids = torch.ones(1, 1, dtype=torch.long, device="meta")

    def run() -> DynamicCache:
        cache = DynamicCache(config=config)
        # With a mask, or some look for padding among the ids, which are not there.
        model(input_ids=ids, attention_mask=ids, use_cache=True, **{cache_keyword(model): cache})
        return cache

    try:
        with torch.device("meta"):
            return run()
    except Exception as error:  # whatever a model's code raises
        try:
            return run()
        except Exception:
            raise error from None


def _weight_bytes(model: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


def _stored_bytes(layer: Any) -> int:
    """Bytes of keys and values a token."""
    tensors = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return sum(t.shape[1] * t.shape[3] * t.element_size() for t in tensors if t is not None and t.dim() == 4)


def _state_bytes(layer: Any) -> int:
    states = [getattr(layer, name, None) or {} for name in ("conv_states", "recurrent_states")]
    return sum(t.numel() * t.element_size() for by_index in states for t in by_index.values() if t is not None)
