"""What generate() of an enabled model does besides: rows that have finished are told to their cache.

transformers feeds padding to finished rows until the last one ends, and its mask calls that padding real. Only the
stopping criteria know which rows have ended, so their list is replaced by one that passes its verdict on.
"""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteriaList

from hf_paged.cache import PagedCache

_calls = threading.local()
"""Per thread, the caches of the generate() calls that are running, innermost last: None where rows are not followed."""


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
        original = self.before or getattr(type(model), self._name).__get__(model)
        return _REPLACEMENTS[self._name](original, *args, **kwargs)

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


def _generate(original: Callable, *args: Any, **kwargs: Any) -> Any:
    cache = cache_of(kwargs)
    # Where candidates are drafted, or a loop of the user's own runs, the criteria's verdict is not about rows.
    drafts = any(kwargs.get(name) is not None for name in ("assistant_model", "custom_generate"))
    stack = _calls.__dict__.setdefault("stack", [])
    stack.append(None if cache is None or drafts else weakref.ref(cache))
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


def _get_stopping_criteria(original: Callable, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
    criteria = original(generation_config, *args, **kwargs)
    stack = getattr(_calls, "stack", None)
    cache = stack[-1] if stack else None
    follows = (
        cache is not None
        # Without an EOS token transformers goes on sampling real tokens for rows that have ended.
        and any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        and (generation_config.num_beams or 1) == 1
        and not generation_config.prompt_lookup_num_tokens
        and not getattr(generation_config, "is_assistant", False)
    )
    return _FollowedCriteria(criteria, cache) if follows else criteria


class _FollowedCriteria(StoppingCriteriaList):
    """Stopping criteria that tell a cache which rows have ended."""

    def __init__(self, criteria: StoppingCriteriaList, cache: weakref.ref[PagedCache]) -> None:
        super().__init__(criteria)
        self._cache = cache

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        done = super().__call__(input_ids, scores, **kwargs)
        cache = self._cache()
        if cache is not None and done.device.type == "cpu":  # elsewhere reading it would wait for the device
            cache.mark_finished(done.numpy())
        return done


_REPLACEMENTS = {"generate": _generate, "_get_stopping_criteria": _get_stopping_criteria}
