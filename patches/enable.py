"""Switching a model over to paged attention, and back.

The mechanism is transformers' attention interface: the configs of the model name the implementation, and modules look
it up at every call. Models that do not use it are given forwards of ours where there are such (see `families.py`).
Two hooks and one wrapper go with it (see `generation.py`): a forward pass of the model that fails is undone, a
`use_cache=False` beside a cache is refused, and rows that finish are noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import EncoderDecoderCache, PreTrainedConfig, PreTrainedModel

from hf_paged.cache import PagedCache
from hf_paged.host import on_the_host
from hf_paged.masks import IMPLEMENTATION
from hf_paged.patches.calls import SHARES_PROMPTS, cache_of
from hf_paged.patches.compiled import (
    COMPILES,
    EAGER_BECAUSE,
    GRAPHS,
    end_step,
    may_compile,
    prepare_step,
    run_eagerly,
    step_cache_of,
)
from hf_paged.patches.families import (
    PatchedModules,
    find_family,
    name_for,
    patch_family,
    unpatch_family,
)
from hf_paged.patches.generation import patch_generation, unpatch_generation
from hf_paged.patches.linears import has_packed_linears, unpack_linears
from hf_paged.step_cache import StepCache


@dataclass
class _Enabled:
    """What `disable_paged_attention` puts back.

    Attributes:
        is_asked_for: the user has enabled the model, not only batchers that are open.
        borrowers: these batchers. The model stays enabled until neither is left.
    """

    is_asked_for: bool = True
    borrowers: int = 0
    implementations: list[tuple[PreTrainedConfig, Any]] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    patched: PatchedModules = field(default_factory=PatchedModules)


_STATE = "_hf_paged_enabled"
"""Attribute of an enabled model. It is kept there, not here, so that a deep copy of the model has its own."""


def enable_paged_attention(
    model: torch.nn.Module, *, share_prompts: bool | None = None, compile: bool | None = None
) -> torch.nn.Module:
    """Let a model's attention read the blocks of a `PagedCache` where they are. Enabling twice is harmless.

    Without a PagedCache the model behaves as with `attn_implementation="sdpa"`, training included. Bloom, Falcon,
    GPT-Neo and MPT compute attention in their own code: without a PagedCache they run it as ever, and with one their
    attention modules run forwards of ours.

    Args:
        model: a transformers model, or a wrapper that holds one (PEFT).
        share_prompts: a prompt that generate() repeats, for beams or several samples, is computed once and its rows
            share its blocks. On by default; enabling again can change it.
        compile: whether generate() compiles the decode step. By default it does where transformers compiles: on GPUs,
            and where a `CompileConfig` asks for it. Enabling again can change it.

    Returns:
        The same model.

    Raises:
        TypeError: not a transformers model.
        NotImplementedError: the model computes attention in its own code and is none of those four, or not as it is
            known here (another implementation or setting, another library's forward); the message names it.
    """
    core = find_model(model)
    if share_prompts is None:
        share_prompts = vars(core).get(SHARES_PROMPTS, True)
    if compile is None:
        compile = vars(core).get(COMPILES)
    elif compile != vars(core).get(COMPILES) or compile:
        for name in (EAGER_BECAUSE, GRAPHS):  # try again what could not be compiled
            vars(core).pop(name, None)
    if _STATE in vars(core):
        vars(core)[_STATE].is_asked_for = True
        setattr(core, SHARES_PROMPTS, share_prompts)
        setattr(core, COMPILES, compile)
        return model
    submodels = [module for module in core.modules() if isinstance(module, PreTrainedModel)]
    families = {id(m): find_family(m) for m in _outside_the_interface(core, submodels)}
    submodels = [m for m in submodels if m._can_set_attn_implementation() or id(m) in families]
    state = _Enabled()
    try:
        seen: set[int] = set()
        for submodel in submodels:
            config, family, name = submodel.config, families.get(id(submodel)), IMPLEMENTATION
            if family is not None:
                patch_family(submodel, family, state.patched)
                name = name_for(config, family)
            now = config._attn_implementation
            if id(config) not in seen and (now != name or type(now) is not type(name)):
                seen.add(id(config))
                state.implementations.append((config, config._attn_implementation_internal))
                config._attn_implementation_internal = name
        state.hooks.append(core.register_forward_pre_hook(_before_forward, with_kwargs=True))
        state.hooks.append(core.register_forward_hook(_after_forward, with_kwargs=True, always_call=True))
        patch_generation(core)
    except BaseException:
        _restore(core, state)
        raise
    setattr(core, _STATE, state)
    setattr(core, SHARES_PROMPTS, share_prompts)
    setattr(core, COMPILES, compile)
    return model


def disable_paged_attention(model: torch.nn.Module) -> torch.nn.Module:
    """Undo `enable_paged_attention`, and `pack_linears`: every setting is what it was before. Harmless on a model that
    is not enabled.

    Returns:
        The same model.
    """
    undo_enable(find_model(model))
    return unpack_linears(model)


def undo_enable(core: PreTrainedModel) -> None:
    """`disable_paged_attention` for a transformers model whose linear layers stay as they are."""
    state = vars(core).pop(_STATE, None)
    for name in (SHARES_PROMPTS, COMPILES, EAGER_BECAUSE, GRAPHS):
        vars(core).pop(name, None)
    if state is not None:
        _restore(core, state)


@contextmanager
def paged_attention(
    model: torch.nn.Module, *, share_prompts: bool | None = None, compile: bool | None = None
) -> Iterator[torch.nn.Module]:
    """`with paged_attention(model):` enables within, and disables at the end, also after an exception. A model that was
    enabled before stays so, and one whose linear layers were packed stays packed. Arguments as for
    `enable_paged_attention`."""
    core = find_model(model)
    had_packed_linears = has_packed_linears(model)
    state = vars(core).get(_STATE)
    was_asked_for = state is not None and state.is_asked_for
    before = None if state is None else {name: vars(core).get(name) for name in (SHARES_PROMPTS, COMPILES)}
    enable_paged_attention(model, share_prompts=share_prompts, compile=compile)
    try:
        yield model
    finally:
        if _STATE in vars(core):
            vars(core).update(before or {})
            vars(core)[_STATE].is_asked_for = was_asked_for
            _undo_if_unused(core)
        if not was_asked_for and not had_packed_linears:
            unpack_linears(model)


def borrow(core: PreTrainedModel) -> Callable[[], None]:
    """Keep a transformers model enabled until the function that is returned is called, once."""
    if _STATE not in vars(core):
        enable_paged_attention(core)
        vars(core)[_STATE].is_asked_for = False
    state = vars(core)[_STATE]
    state.borrowers += 1

    def give_back() -> None:
        state.borrowers -= 1
        if vars(core).get(_STATE) is state:  # not undone meanwhile
            _undo_if_unused(core)

    return give_back


def _undo_if_unused(core: PreTrainedModel) -> None:
    state = vars(core)[_STATE]
    if not state.is_asked_for and not state.borrowers:
        undo_enable(core)


def _outside_the_interface(core: PreTrainedModel, submodels: list[PreTrainedModel]) -> list[PreTrainedModel]:
    """The submodels with attention of their own that must be given forwards of ours. An encoder of images or sounds
    need not, beside a decoder that goes through the interface."""
    try:
        decoder = core.config.get_text_config(decoder=True)
    except ValueError:  # it has several
        decoder = core.config
    decoders = [m for m in submodels if m.config is decoder]
    if decoder is not core.config and decoders and all(m._can_set_attn_implementation() for m in decoders):
        return []
    return [m for m in submodels if not m._can_set_attn_implementation()]


def _restore(model: PreTrainedModel, state: _Enabled) -> None:
    unpatch_generation(model)
    for hook in state.hooks:
        hook.remove()
    unpatch_family(state.patched)
    for config, implementation in state.implementations:
        config._attn_implementation_internal = implementation


def is_enabled(model: torch.nn.Module) -> bool:
    """Whether `enable_paged_attention` was called on the model, and not undone."""
    return _STATE in vars(find_model(model))


def find_model(model: torch.nn.Module) -> PreTrainedModel:
    """The transformers model in `model`, which may be a wrapper around one.

    Raises:
        TypeError: there is none.
    """
    if isinstance(model, PreTrainedModel):
        return model
    if isinstance(model, torch.nn.Module):
        if hasattr(model, "get_base_model"):  # PEFT
            return find_model(model.get_base_model())
        inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        if inner is not None:
            return inner
    raise TypeError(f"paged attention is enabled on a transformers model, not on {type(model).__name__}")


def _before_forward(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
    cache = cache_of(kwargs)
    if cache is None:
        return None
    _tell_offsets(cache, kwargs)
    return _begin_pass(module, cache, args, kwargs, torch.compiler.is_compiling())


@on_the_host
def _tell_offsets(cache: PagedCache, kwargs: dict[str, Any]) -> None:
    """Let an encoder-decoder's pair of caches give the decoder's own query offset, by which the mask function knows the
    cache; by itself it gives the bare length."""
    for name in ("cache", "past_key_values"):
        pair = kwargs.get(name)
        if isinstance(pair, EncoderDecoderCache) and pair.self_attention_cache is cache:
            pair.get_query_offset = cache.get_query_offset


@on_the_host
def _begin_pass(
    module: PreTrainedModel, cache: PagedCache, args: tuple, kwargs: dict[str, Any], is_in_graph: bool
) -> tuple[tuple, dict] | None:
    if kwargs.get("use_cache") is False:
        raise ValueError("use_cache=False was passed together with a cache; leave out one of them")
    cache.enter_pass()
    # The user may have compiled the model, this hook included, or its forward() alone.
    has_compiled_forward = not is_in_graph and hasattr(module.forward, "_torchdynamo_orig_callable")
    if not is_in_graph and not has_compiled_forward:
        return None
    try:
        prepared = (
            prepare_step(module, cache, args, kwargs, by_hooks=True)
            if may_compile(module, cache, args, kwargs)
            else None
        )
        if prepared is None and has_compiled_forward:
            run_eagerly(cache)
    except BaseException:
        cache.leave_pass(failed=True)
        raise
    return None if prepared is None else (args, prepared)


def _after_forward(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    # This hook is called after an exception too, then without an output; not after a KeyboardInterrupt, which
    # generate() and the next pass take care of.
    step_cache = step_cache_of(kwargs)
    if step_cache is not None:
        return _end_step(step_cache, output) if step_cache.by_hooks else None
    cache = cache_of(kwargs)
    if cache is not None:
        _end_pass(cache, output)
    return None


@on_the_host
def _end_pass(cache: PagedCache, output: Any) -> None:
    cache.leave_pass(failed=output is None)


@on_the_host
def _end_step(step_cache: StepCache, output: Any) -> Any:
    return end_step(step_cache, output)
