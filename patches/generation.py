"""What generate() of an enabled model does besides.

Rows that have finished are told to their cache: transformers feeds padding to them until the last one ends, and its
mask calls that padding real. Only the stopping criteria know which rows have ended, so their list is replaced by one
that passes its verdict on.

A prompt that generate() repeats, for beams or for several samples, is computed once, and its rows share its blocks.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteriaList

from hf_paged.cache import PagedCache

SHARES_PROMPTS = "_hf_paged_shares_prompts"
"""Attribute of an enabled model: whether prompts that generate() repeats are computed once."""


@dataclass
class _Call:
    """One generate() call that is running."""

    cache: weakref.ref[PagedCache] | None
    """The cache that was passed to it."""
    follows_rows: bool
    """The stopping criteria's verdict is about the rows of that cache."""
    shares_prompts: bool
    repeats: int = 1
    """Into how many rows each prompt was expanded."""
    expanded: tuple[str, ...] = ()
    """The tensors among the model's arguments that were expanded with it."""


_calls = threading.local()
"""Per thread, the generate() calls that are running, innermost last."""


class _Override:
    """A method that replaces one of a model's own on that object alone.

    It holds the model weakly, and a deep copy of the model gets an override bound to the copy.
    """

    def __init__(self, model: PreTrainedModel, name: str, before: Callable | None) -> None:
        self.before = before
        """What the object had under this name as an attribute of its own, if anything."""
        self._model = weakref.ref(model)
        self._name = name
        functools.update_wrapper(self, getattr(type(model), name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        if model is None:
            raise ReferenceError(f"the model of this {self._name}() is gone")
        # A static method in some versions.
        original = self.before or inspect.getattr_static(type(model), self._name).__get__(model, type(model))
        return _REPLACEMENTS[self._name](model, original, *args, **kwargs)

    def __deepcopy__(self, memo: dict) -> _Override:
        model = self._model()
        return _Override(memo.get(id(model), model), self._name, copy.deepcopy(self.before, memo))

    def __reduce__(self) -> Any:
        raise TypeError("call disable_paged_attention(model) before pickling the model")


def patch_generation(model: PreTrainedModel) -> None:
    """Follow the rows of generate() calls on this model."""
    for name in _REPLACEMENTS:
        if hasattr(type(model), name):
            setattr(model, name, _Override(model, name, vars(model).get(name)))


def unpatch_generation(model: PreTrainedModel) -> None:
    """Undo `patch_generation`."""
    for name in _REPLACEMENTS:
        override = vars(model).get(name)
        if isinstance(override, _Override):
            if override.before is None:
                delattr(model, name)
            else:
                setattr(model, name, override.before)


def cache_of(kwargs: dict[str, Any]) -> PagedCache | None:
    """The PagedCache among the arguments of a forward or generate() call, under either name that transformers gives it;
    of an encoder-decoder's pair of caches, the decoder's own."""
    for name in ("cache", "past_key_values"):
        cache = kwargs.get(name)
        cache = getattr(cache, "self_attention_cache", cache)
        if isinstance(cache, PagedCache):
            return cache
    return None


def _generate(model: PreTrainedModel, original: Callable, *args: Any, **kwargs: Any) -> Any:
    cache = cache_of(kwargs)
    # Where candidates are drafted, or a loop of the user's own runs, the criteria's verdict is not about rows.
    drafts = any(kwargs.get(name) is not None for name in ("assistant_model", "custom_generate"))
    stack = _calls.__dict__.setdefault("stack", [])
    own = cache is not None and not drafts
    stack.append(_Call(weakref.ref(cache) if own else None, own, own and getattr(model, SHARES_PROMPTS, False)))
    try:
        if cache is not None:
            _check_prompt(cache, *args, **kwargs)
            cache.clear_finished()
        return original(*args, **kwargs)
    except BaseException:
        if cache is not None:
            cache.leave_pass(failed=True)
        raise
    finally:
        stack.pop()
        if cache is not None:
            cache.clear_finished()


def _check_prompt(cache: PagedCache, /, inputs: Any = None, *args: Any, **kwargs: Any) -> None:
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


def _current_call() -> _Call | None:
    stack = getattr(_calls, "stack", None)
    return stack[-1] if stack else None


def _get_stopping_criteria(
    model: PreTrainedModel, original: Callable, generation_config: Any, *args: Any, **kwargs: Any
) -> Any:
    criteria = original(generation_config, *args, **kwargs)
    call = _current_call()
    follows = (
        call is not None
        and call.follows_rows
        # Without an EOS token transformers goes on sampling real tokens for rows that have ended.
        and any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        and (generation_config.num_beams or 1) == 1
        and not generation_config.prompt_lookup_num_tokens
        and not getattr(generation_config, "is_assistant", False)
    )
    return _FollowedCriteria(criteria, call.cache) if follows else criteria


def _expand_inputs(
    model: PreTrainedModel, original: Callable, expand_size: int = 1, *args: Any, **kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    ids, model_kwargs = original(expand_size, *args, **kwargs)
    call = _current_call()
    if call is not None:
        call.repeats = expand_size
        call.expanded = tuple(name for name, value in model_kwargs.items() if isinstance(value, torch.Tensor))
    return ids, model_kwargs


def _prefill(
    model: PreTrainedModel,
    original: Callable,
    input_ids: torch.Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compute each prompt once, and let its rows share the blocks: a row copies one when it writes into it."""
    call = _current_call()
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


class _FollowedCriteria(StoppingCriteriaList):
    """Stopping criteria that tell a cache which rows have ended."""

    def __init__(self, criteria: StoppingCriteriaList, cache: weakref.ref[PagedCache]) -> None:
        super().__init__(criteria)
        self._cache = cache

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        done = super().__call__(input_ids, scores, **kwargs)
        cache = self._cache()
        if cache is not None:
            cache.mark_finished(done)
        return done


_REPLACEMENTS = {
    "generate": _generate,
    "_get_stopping_criteria": _get_stopping_criteria,
    "_expand_inputs_for_generation": _expand_inputs,
    "_prefill": _prefill,
}
