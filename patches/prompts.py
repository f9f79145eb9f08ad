"""What is done with the prompts of generate() calls on an enabled model.

A prompt that generate() repeats, for beams or for several samples, is computed once, and its rows share its blocks.
Where a pool keeps prompts, the beginning of a prompt that was seen before is taken from its blocks, and afterwards the
full blocks of prompt and answer are kept.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from hf_paged.cache import PagedCache
from hf_paged.patches.calls import cache_of, current_call

MODEL_ID = "_hf_paged_model_id"
"""Attribute of an enabled model: a number that no other has had."""
_next_id = itertools.count()


def check_prompt(cache: PagedCache, /, inputs: Any = None, *args: Any, **kwargs: Any) -> None:
    """Refuse a prompt that has nothing new: transformers would append all of it a second time."""
    ids = next((x for x in (inputs, kwargs.get("inputs"), kwargs.get("input_ids")) if x is not None), None)
    past = cache.get_seq_length()
    if not past or not isinstance(ids, torch.Tensor) or ids.ndim != 2 or kwargs.get("inputs_embeds") is not None:
        return
    if not any(kwargs.get(name) is cache for name in ("cache", "past_key_values")):
        return  # one of an encoder-decoder's pair: the inputs are the encoder's
    mask = kwargs.get("attention_mask")
    is_whole = mask is None or mask.shape[-1] == ids.shape[1]
    if is_whole and ids.shape[1] <= past:
        raise ValueError(
            f"the prompt has {ids.shape[1]} positions, and the cache holds {past} already, so nothing is left to feed. "
            "Pass the whole conversation, or crop the cache (cache.crop(-1) lets the last token be fed again); to pass "
            "the new ids alone, pass an attention_mask that covers the cached positions too"
        )
    difference = cache.first_difference(_array(ids)) if is_whole else None
    if difference is not None:
        row, position = difference
        raise ValueError(
            f"the prompt has another token at position {position} of row {row} than the one that the cache holds "
            "there. A cache goes on from what it holds: use a new PagedCache, cache.reset() or cache.crop(), or make "
            "the cache with prefix_cache=True, which takes any prompt"
        )


# Repeated prompts ----------------------------------------------------------------------------------------------------


def expand_inputs(
    model: PreTrainedModel, original: Callable, expand_size: int = 1, *args: Any, **kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    ids, model_kwargs = original(expand_size, *args, **kwargs)
    call = current_call()
    if call is not None:
        call.repeats = expand_size
        call.expanded = tuple(name for name, value in model_kwargs.items() if isinstance(value, torch.Tensor))
    return ids, model_kwargs


def prefill(
    model: PreTrainedModel,
    original: Callable,
    input_ids: torch.Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compute each prompt once, and let its rows share the blocks: a row copies one when it writes into it."""
    call = current_call()
    cache = cache_of(model_kwargs)
    repeats, rows = 1 if call is None or not call.shares_prompts else call.repeats, len(input_ids)
    tensors = {name: model_kwargs[name] for name in call.expanded if name in model_kwargs} if repeats > 1 else {}
    if (
        repeats == 1
        or cache is None
        or cache is not call.cache()
        or not any(model_kwargs.get(name) is cache for name in ("cache", "past_key_values"))
        or cache.batch_size not in (-1, rows // repeats)
        # Images of several rows lie one after the other: what belongs to a row cannot be told.
        or model_kwargs.get("mm_encoder_outputs") is not None
        or any(tensor.shape[_batch_dim(name, tensor)] != rows for name, tensor in tensors.items())
    ):
        return original(input_ids, generation_config, model_kwargs, *args, **kwargs)

    once = {
        name: tensor[:, ::repeats] if _batch_dim(name, tensor) else tensor[::repeats]
        for name, tensor in tensors.items()
    }
    prompts = input_ids[::repeats]
    outputs = original(prompts, generation_config, {**model_kwargs, **once}, *args, **kwargs)
    cache.batch_repeat_interleave(repeats)
    for name, value in outputs.items():
        outputs[name] = _repeated(value, len(prompts), repeats)
    return outputs


def _batch_dim(name: str, tensor: torch.Tensor) -> int:
    """Which dimension of a model's argument is the batch; in positions of multimodal models it is the second."""
    return 1 if name == "position_ids" and tensor.ndim == 3 else 0


def _repeated(value: Any, rows: int, repeats: int) -> Any:
    """A model's output of `rows` rows with each row `repeats` times; tuples of such (hidden states) too."""
    if isinstance(value, torch.Tensor):
        return value.repeat_interleave(repeats, dim=0) if value.ndim and value.shape[0] == rows else value
    if isinstance(value, tuple | list):
        return type(value)(_repeated(item, rows, repeats) for item in value)
    return value


# Kept prompts ---------------------------------------------------------------------------------------------------------


def begin_kept(model: PreTrainedModel, cache: PagedCache, /, inputs: Any = None, *args: Any, **kwargs: Any) -> Hashable:
    """Before generate(): let the cache begin with what is kept of the prompt.

    A cache that keeps prompts takes any prompt: one that does not go on from what its rows hold begins new rows.

    Returns:
        The key under which the call's tokens may be kept, or None where they may not.
    """
    if not cache.keeps_prompts:
        return None
    ids = next((x for x in (inputs, kwargs.get("inputs"), kwargs.get("input_ids")) if x is not None), None)
    mask = _mask_of(model, ids, kwargs)
    known = isinstance(ids, torch.Tensor) and ids.ndim == 2 and mask is not None and mask.shape == ids.shape
    if known:
        is_new = not cache.goes_on(_array(ids), _array(mask))
    else:
        is_new = not isinstance(mask, torch.Tensor)  # a longer mask says that the ids are new ones alone
    if is_new and cache.knows_its_tokens:
        cache.reset()
    if not known or not _depends_on_tokens_alone(model, cache, args, kwargs):
        return None
    key = _model_key(model)
    if cache.batch_size == -1:
        cache.adopt_prompt(key, _array(ids), _array(mask))
    return key


def end_kept(
    cache: PagedCache, key: Hashable, num_beams: int, output: Any, /, inputs: Any = None, *args: Any, **kwargs: Any
) -> None:
    """After generate(): note what its rows hold, and keep it where prompts are kept."""
    sequences = output if isinstance(output, torch.Tensor) else getattr(output, "sequences", None)
    prompt = next((x for x in (inputs, kwargs.get("inputs"), kwargs.get("input_ids")) if x is not None), None)
    rows, custom = cache.batch_size, kwargs.get("custom_generate") is not None
    known = isinstance(sequences, torch.Tensor) and len(sequences) == rows and num_beams == 1 and not custom
    if not cache.keeps_prompts:
        if known:
            cache.note_tokens(_array(sequences))
    elif key is None or rows < 1 or not isinstance(sequences, torch.Tensor) or rows % len(prompt):
        cache.let_go()
    elif known:
        cache.keep_tokens(key, _array(sequences))
    else:  # which beam a row is, is not known; but all of a prompt's begin with the prompt
        cache.keep_tokens(key, _array(prompt).repeat(rows // len(prompt), axis=0))


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _mask_of(model: PreTrainedModel, ids: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The padding mask of a prompt, or None where generate() may think of another."""
    mask = kwargs.get("attention_mask")
    if mask is not None or not isinstance(ids, torch.Tensor):
        return mask
    config = kwargs.get("generation_config") or model.generation_config
    pad = kwargs.get("pad_token_id", config.pad_token_id)
    return None if pad is not None and (ids == pad).any() else torch.ones_like(ids)


_PLAIN = frozenset(inspect.signature(GenerationMixin.generate).parameters) | {"input_ids", "attention_mask"}
_TELLING = ("output_attentions", "output_hidden_states")  # what is told of a prompt must be computed


def _depends_on_tokens_alone(model: PreTrainedModel, cache: PagedCache, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether keys and values of a call follow from the tokens and the model's weights: not so with embeddings, images
    or positions of the user's, with frequencies that depend on the length, or while training."""
    config = kwargs.get("generation_config") or model.generation_config
    plain = all(
        value is None or value is cache or name in _PLAIN or hasattr(GenerationConfig(), name)
        for name, value in kwargs.items()
    )
    rope = str(getattr(model.config, "rope_parameters", None) or getattr(model.config, "rope_scaling", None))
    return (
        plain
        and not args
        and any(kwargs.get(name) is cache for name in ("cache", "past_key_values"))
        and kwargs.get("custom_generate") is None
        and not any(kwargs.get(name, getattr(config, name, None)) for name in _TELLING)
        and not model.training
        and not model.config.is_encoder_decoder
        and "longrope" not in rope
        and "dynamic" not in rope
    )


def _model_key(model: PreTrainedModel) -> Hashable:
    """Changes with the model, its weights (in place, too), its adapters and whether they are on."""
    if MODEL_ID not in vars(model):
        setattr(model, MODEL_ID, next(_next_id))
    weights = hash(
        tuple((tensor.data_ptr(), _version(tensor)) for tensor in itertools.chain(model.parameters(), model.buffers()))
    )
    adapters = tuple(
        (str(module.active_adapters), getattr(module, "disable_adapters", None), str(getattr(module, "scaling", None)))
        for module in model.modules()
        if hasattr(module, "active_adapters") and not isinstance(module, PreTrainedModel)
    )
    return vars(model)[MODEL_ID], weights, adapters


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; tensors made in inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version
