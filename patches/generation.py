"""What generate() of an enabled model does besides.

Rows that have finished are told to their cache: transformers feeds padding to them until the last one ends, and its
mask calls that padding real. Only the stopping criteria know which rows have ended, so their list is replaced by one
that passes its verdict on.

What is done with its prompt is in `prompts.py`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMode

from hf_paged.cache import PagedCache
from hf_paged.models import cache_keyword
from hf_paged.patches.calls import SHARES_PROMPTS, Call, cache_of, current_call, running_calls
from hf_paged.patches.compiled import compiled_call, meets_criteria, update_kwargs
from hf_paged.patches.prompts import begin_kept, check_prompt, end_kept, expand_inputs, prefill


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


def _generate(model: PreTrainedModel, original: Callable, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = _by_keyword(original, args, kwargs)
    inputs = args[:1]
    cache = cache_of(kwargs) or _cache_for_assistant(model, kwargs)
    if cache is not None and kwargs.get("cache") is None and _warns_of_old_name(model, original):
        kwargs["cache"] = kwargs.pop("past_key_values")
    said = {**kwargs, "args": args[1:]} if args[1:] else kwargs
    if cache is None:
        return _run(Call(None, False, False, tokenizer=kwargs.get("tokenizer")), original, *args, **kwargs)
    # Where candidates are drafted, or a loop of the user's own runs, the criteria's verdict is not about rows.
    own = not any(kwargs.get(name) is not None for name in ("assistant_model", "custom_generate"))
    call = Call(
        cache=weakref.ref(cache) if own else None,
        follows_rows=own,
        shares_prompts=own and getattr(model, SHARES_PROMPTS, False),
        assistant_block_size=None if own else cache.block_size,
        tokenizer=kwargs.get("tokenizer"),
    )
    try:
        key = begin_kept(model, cache, *inputs, **said)
        check_prompt(model, cache, *inputs, **said)
        cache.clear_finished()
        output = _run(call, original, *args, **kwargs)
        cache.clear_finished()
        end_kept(model, cache, key, call.num_beams, output, *inputs, **said)
        return output
    except BaseException:
        cache.leave_pass(failed=True)
        cache.clear_finished()
        cache.prompts.let_go()
        raise


def _by_keyword(original: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a generate() call with all but the inputs by keyword; as they are where their names are not
    known, as for a generate() that takes `*args` (Granite Speech)."""
    if len(args) < 2:
        return args, kwargs
    signature = inspect.signature(original)
    kinds = {parameter.kind: name for name, parameter in signature.parameters.items()}
    unnamed = inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.POSITIONAL_ONLY in kinds
    if unnamed or "self" in signature.parameters:  # the latter: a function that says that it is the class's method
        return args, kwargs
    named = signature.bind(*args, **kwargs).arguments
    named.update(named.pop(kinds.get(inspect.Parameter.VAR_KEYWORD), {}))
    first = next(iter(named))
    return (named.pop(first),), named


def _warns_of_old_name(model: PreTrainedModel, original: Callable) -> bool:
    """Whether this generate() warns of `past_key_values`, and takes it as `cache`. One that is not transformers' own
    may read it under its old name."""
    return cache_keyword(model) == "cache" and str(getattr(original, "__module__", "")).startswith("transformers.")


def _cache_for_assistant(model: PreTrainedModel, kwargs: dict[str, Any]) -> PagedCache | None:
    """An assistant model that is enabled drafts with a PagedCache of its own, where the main model has one."""
    call, config = current_call(), kwargs.get("generation_config")
    if call is None or call.assistant_block_size is None or not getattr(config, "is_assistant", False):
        return None
    size = call.assistant_block_size
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    cache = PagedCache(model.config, block_size=size, num_blocks=positions and -(-positions // size) + 1)
    kwargs[cache_keyword(model)] = cache  # transformers takes it from the output and hands it in again
    return cache


def _run(call: Call, original: Callable, *args: Any, **kwargs: Any) -> Any:
    stack = running_calls()
    stack.append(call)
    try:
        return original(*args, **kwargs)
    finally:
        stack.pop()


def _get_stopping_criteria(
    model: PreTrainedModel, original: Callable, generation_config: Any, *args: Any, **kwargs: Any
) -> Any:
    call = current_call()
    if call is not None and generation_config.stop_strings is not None and kwargs.get("tokenizer") is None:
        kwargs["tokenizer"] = call.tokenizer  # generate() loses it on the way to a loop of the caller's own
    criteria = original(generation_config, *args, **kwargs)
    if call is not None:
        call.num_beams = generation_config.num_beams or 1
    follows = (
        call is not None
        and call.follows_rows
        # Without an EOS token transformers goes on sampling real tokens for rows that have ended.
        and any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        and call.num_beams == 1
        and generation_config.get_generation_mode() != GenerationMode.ASSISTED_GENERATION
        and not getattr(generation_config, "is_assistant", False)
    )
    return _FollowedCriteria(criteria, call.cache) if follows else criteria


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
    "_expand_inputs_for_generation": expand_inputs,
    "_prefill": prefill,
    "_valid_auto_compile_criteria": meets_criteria,
    "get_compiled_call": compiled_call,
    "_update_model_kwargs_for_generation": update_kwargs,
}
