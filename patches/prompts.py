"""What is done with the prompts of generate() calls on an enabled model.

A prompt that generate() repeats, for beams or for several samples, is computed once, and its rows share its blocks.
Where a pool keeps prompts, the beginning of a prompt that was seen before is taken from its blocks, and afterwards the
full blocks of prompt and answer are kept.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import GenerationMode

from hf_paged.cache import PagedCache
from hf_paged.patches.calls import cache_of, current_call

_next_id = itertools.count()
_model_ids: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()
"""A number for each model, that no other has had."""
SAMPLES = 64
"""Values of each weight that are looked at."""


def check_prompt(model: PreTrainedModel, cache: PagedCache, /, inputs: Any = None, **kwargs: Any) -> None:
    """Refuse a prompt that has nothing new: transformers would append all of it a second time."""
    ids = _prompt_of(inputs, kwargs)
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
            "For another prompt, use a new PagedCache, cache.reset(), or a cache with prefix_cache=True, which takes "
            "any. To go on, pass the whole conversation, or crop the cache (cache.crop(-1) lets the last token be fed "
            "again); to pass the new ids alone, pass an attention_mask that covers the cached positions too"
        )
    if is_whole and cache.prompts.are_beams:
        raise ValueError(
            "the rows of this cache are the beams of a search, in an order of its own, so no prompt can go on from "
            "them: use a new PagedCache or cache.reset()"
        )
    if is_whole and is_drafting(model, kwargs):
        raise ValueError(
            "assisted decoding, use_mtp and prompt lookup begin with an empty cache (transformers' loop feeds the "
            "whole prompt): use a new PagedCache or cache.reset()"
        )
    difference = cache.prompts.first_difference(_array(ids)) if is_whole else None
    if difference is not None:
        row, position = difference
        raise ValueError(
            f"the prompt has another token at position {position} of row {row} than the one that the cache holds "
            "there (as a batch has that is padded to another width). A cache goes on from what it holds: use a new "
            "PagedCache, cache.reset() or cache.crop(), or make the cache with prefix_cache=True, which takes any"
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


def begin_kept(model: PreTrainedModel, cache: PagedCache, /, inputs: Any = None, **kwargs: Any) -> Hashable:
    """Before generate(): let the cache begin with what is kept of the prompt.

    A cache that keeps prompts takes others, too: where its rows came from generate() calls, and the prompt does not go
    on from them under the same weights, it begins new ones.

    Returns:
        The key under which the call's tokens may be kept, or None where they may not.
    """
    if not cache.prompts.are_kept or model.config.is_encoder_decoder:  # whose prompt is the encoder's
        return None
    ids = _prompt_of(inputs, kwargs)
    mask = _mask_of(model, ids, kwargs)
    drafts = is_drafting(model, kwargs)
    if not (isinstance(ids, torch.Tensor) and ids.ndim == 2 and mask is not None and mask.shape == ids.shape):
        if cache.prompts.are_known and not isinstance(mask, torch.Tensor):
            cache.reset()
        return None
    key, tokens, seen = model_key(model), _array(ids), _array(mask)
    goes_on = cache.prompts.go_on(key, tokens, seen) and not drafts
    if cache.prompts.are_known and not goes_on:
        cache.reset()
    is_empty = cache.batch_size == -1
    if drafts or not (is_empty or goes_on) or not _depends_on_tokens_alone(model, cache, kwargs):
        return None
    if not seen[:, -1].all():  # what follows padding on the right stands at other positions than alone
        return None
    if is_empty and not _tells_of_prompt(model, kwargs):
        cache.prompts.adopt(key, tokens, seen)
    return key


def end_kept(
    model: PreTrainedModel,
    cache: PagedCache,
    key: Hashable,
    num_beams: int,
    output: Any,
    /,
    inputs: Any = None,
    **kwargs: Any,
) -> None:
    """After generate(): note what its rows hold, and keep it where prompts are kept."""
    sequences = output if isinstance(output, torch.Tensor) else getattr(output, "sequences", None)
    ids, rows, length = _prompt_of(inputs, kwargs), cache.batch_size, cache.get_seq_length()
    mask = kwargs.get("attention_mask")
    if num_beams > 1:
        cache.prompts.note_beams()
    followed = (
        isinstance(sequences, torch.Tensor)
        and isinstance(ids, torch.Tensor)
        and sequences.shape == (rows, length + 1)
        and (mask is None or mask.shape[-1] == ids.shape[-1])
        and num_beams == 1
        and kwargs.get("custom_generate") is None
    )
    if not cache.prompts.are_kept:
        if followed:
            cache.prompts.note_tokens(_array(sequences[:, :length]))
    elif key is None:
        if is_drafting(model, kwargs):
            cache.prompts.let_go()
    elif followed:
        cache.prompts.keep(key, _array(sequences[:, :length]))
    elif rows > 0 and rows % len(ids) == 0:  # which beam a row is, is not known; but all of a prompt's begin with it
        cache.prompts.keep(key, _array(ids).repeat(rows // len(ids), axis=0))
    else:
        cache.prompts.let_go()


def is_drafting(model: PreTrainedModel, kwargs: dict[str, Any]) -> bool:
    """Whether a call drafts candidates: with an assistant, with layers of the model's own, or from the prompt.
    transformers' loop for these is right on an empty cache only."""
    mode = _settings_of(model, kwargs).get_generation_mode(kwargs.get("assistant_model"))
    return mode == GenerationMode.ASSISTED_GENERATION


def _settings_of(model: PreTrainedModel, kwargs: dict[str, Any]) -> GenerationConfig:
    """What a generate() call runs by: its arguments, its config, and the model's defaults."""
    others = {name: value for name, value in kwargs.items() if name != "generation_config"}
    return model._prepare_generation_config(kwargs.get("generation_config"), **others)[0]


def _prompt_of(inputs: Any, kwargs: dict[str, Any]) -> Any:
    return next((x for x in (inputs, kwargs.get("inputs"), kwargs.get("input_ids")) if x is not None), None)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _mask_of(model: PreTrainedModel, ids: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The padding mask of a prompt, or None where generate() may think of another."""
    mask = kwargs.get("attention_mask")
    if mask is not None or not isinstance(ids, torch.Tensor):
        return mask
    pad = _settings_of(model, kwargs).pad_token_id
    return None if pad is not None and (ids == pad).any() else torch.ones_like(ids)


_PLAIN = (
    frozenset(inspect.signature(GenerationMixin.generate).parameters)
    | frozenset(vars(GenerationConfig()))
    | {"input_ids", "attention_mask"}
)
"""Arguments of generate() on which keys and values do not depend, but through the tokens."""


def _tells_of_prompt(model: PreTrainedModel, kwargs: dict[str, Any]) -> bool:
    """Whether a call tells more of a prompt than what follows it, so that all of it must be computed."""
    settings = _settings_of(model, kwargs)
    return any(getattr(settings, name, None) for name in ("output_attentions", "output_hidden_states"))


def _depends_on_tokens_alone(model: PreTrainedModel, cache: PagedCache, kwargs: dict[str, Any]) -> bool:
    """Whether keys and values of a call follow from the tokens and the model's weights: not so with embeddings, images
    or positions of the user's, with frequencies that depend on the length, or while training."""
    plain = all(value is None or value is cache or name in _PLAIN for name, value in kwargs.items())
    rope = str(getattr(model.config, "rope_parameters", None) or getattr(model.config, "rope_scaling", None))
    return (
        plain
        and any(kwargs.get(name) is cache for name in ("cache", "past_key_values"))
        and kwargs.get("custom_generate") is None
        and not model.training
        and "longrope" not in rope
        and "dynamic" not in rope
    )


def model_key(model: PreTrainedModel) -> Hashable:
    """Changes with the model, its weights, its adapters and whether they are on, and its hooks.

    Weights are told by where they lie, how often torch saw them written, and a sample of their values, since fused
    optimizers and writes through `.data` are not seen.
    """
    if model not in _model_ids:
        _model_ids[model] = next(_next_id)
    adapters, hooks = [], []
    for module in model.modules():
        for registered in (module._forward_hooks, module._forward_pre_hooks):
            # Their numbers are given once.
            hooks += [number for number, hook in registered.items() if not _is_ours(hook)]
        if hasattr(module, "active_adapters") and not isinstance(module, PreTrainedModel):
            state = (getattr(module, name, None) for name in ("active_adapters", "disable_adapters", "scaling"))
            adapters.append(str(tuple(state)))
    return _model_ids[model], _weights_key(model), tuple(adapters), tuple(hooks)


def _is_ours(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith("hf_paged.")


def _weights_key(model: PreTrainedModel) -> int:
    places, samples = [], {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        places.append((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version))
        if tensor.is_contiguous() and tensor.numel() and tensor.device.type != "meta":
            flat = tensor.detach().view(-1)
            sample = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES]
            samples.setdefault((tensor.device, tensor.dtype), []).append(sample)
    values = [torch.cat(some).contiguous().view(torch.uint8).cpu().numpy().tobytes() for some in samples.values()]
    return hash((tuple(places), tuple(values)))
