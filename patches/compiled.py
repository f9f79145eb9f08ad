"""Compiled decode steps.

generate() compiles the forward pass where transformers' criteria and its own cache say so. The graph is then given a
`StepCache`, filled for the step, in place of the `PagedCache`. The masks are made before it, outside, as transformers
does for caches of a static shape: that begins the step, and says whether the kernel expresses all they mean.

A model that the user has compiled is handled likewise, in the hooks around its forward pass.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from transformers import CompileConfig, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from hf_paged.cache import PagedCache
from hf_paged.models import cache_keyword
from hf_paged.patches.calls import cache_of
from hf_paged.patches.families import has_forwards_of_ours
from hf_paged.step_cache import MAX_QUERIES, StepCache

logger = logging.getLogger("hf_paged")

COMPILES = "_hf_paged_compiles"
"""Attribute of an enabled model: whether generate() compiles decode steps; None for where transformers would."""
EAGER_BECAUSE = "_hf_paged_eager_because"
"""Attribute of an enabled model: why its decode steps are not compiled any more."""
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "block_sequence_ids")
"""Arguments that some models make masks from."""
GRAPHS = "_hf_paged_graphs"
"""Attribute of an enabled model: its `_Graphs`."""
NOT_FOR_MODELS = ("tokenizer", "assistant_tokenizer")
"""Arguments that generate() passes on although no model takes them, and no graph can."""
CANNOT_COMPILE = (
    TorchDynamoException,
    ConstraintViolationError,
    getattr(torch._dynamo.exc, "FailOnRecompileLimitHit", TorchDynamoException),
    NotImplementedError,  # of our attention function, which torch passes on
)


def meets_criteria(
    model: PreTrainedModel, original: Callable, model_kwargs: dict[str, Any], generation_config: GenerationConfig
) -> bool:
    """transformers' criteria for compiling, for a PagedCache too."""
    cache = _bare_cache(model_kwargs)
    switch = vars(model).get(COMPILES)
    if cache is None or switch is False:
        return original(model_kwargs, generation_config)
    if switch:
        generation_config = copy.copy(generation_config)
        generation_config.compile_config = copy.copy(generation_config.compile_config) or CompileConfig()
        generation_config.compile_config._compile_all_devices = True
    with cache.as_compileable():
        if not original(model_kwargs, generation_config):
            return False
    return not decodes_eagerly(model, cache)


def compiled_call(
    model: PreTrainedModel, original: Callable, compile_config: CompileConfig | None = None, *args: Any, **kwargs: Any
) -> Callable:
    """transformers' compiled forward pass; for a PagedCache one that is ours."""
    call = original(compile_config, *args, **kwargs)
    if not hasattr(call, "_torchdynamo_orig_callable"):
        return call  # transformers compiles no such model
    config = compile_config or getattr(model.generation_config, "compile_config", None) or CompileConfig()
    graphs = vars(model).get(GRAPHS)
    if graphs is None or graphs.config != config:
        graphs = _Graphs(config)
        setattr(model, GRAPHS, graphs)
    return functools.partial(_forward, model, call, graphs)


class _Graphs:
    """The compiled forward passes of a model, one for each shape of a step.

    torch counts graphs, and stops at a limit, by the code object that they were made from, which all models of
    transformers share. Here each shape has a code object of its own, and there are as many as torch would allow.
    """

    def __init__(self, config: CompileConfig) -> None:
        self.config = config
        self._calls: dict[tuple[int, bool], Callable] = {}
        self._limit_was_told = False

    def __deepcopy__(self, memo: dict) -> _Graphs:
        return _Graphs(self.config)  # what was compiled is the other model

    def find(self, model: PreTrainedModel, num_rows: int, q_len: int) -> Callable | None:
        """The compiled forward pass for steps of this shape; None where there are as many as there may be.

        Several tokens a row share a graph, whatever their number."""
        shape = (num_rows, q_len > 1)
        call = self._calls.get(shape)
        if call is None:
            limit = getattr(torch._dynamo.config, "recompile_limit", 8)
            if len(self._calls) >= limit:
                if not self._limit_was_told:
                    self._limit_was_told = True
                    logger.warning(
                        "%s has been compiled for %d batch sizes; others decode without torch.compile "
                        "(torch._dynamo.config.recompile_limit is how many there may be)",
                        *(type(model).__name__, limit),
                    )
                return None
            call = self._calls[shape] = torch.compile(_code_of_its_own(model), **self.config.to_dict())
        return call


def _code_of_its_own(model: PreTrainedModel) -> Callable:
    reference = weakref.ref(model)

    def decode_step(**kwargs: Any) -> Any:
        return reference()(**kwargs)

    decode_step.__code__ = decode_step.__code__.replace()
    return decode_step


def update_kwargs(
    model: PreTrainedModel, original: Callable, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """transformers' step from one decode step's arguments to the next one's, which extends the mask."""
    before = model_kwargs.get("attention_mask")
    model_kwargs = original(outputs, model_kwargs, *args, **kwargs)
    name = "_update_model_kwargs_for_generation"
    cache = _bare_cache(model_kwargs)
    if cache is not None and getattr(type(model), name) is getattr(GenerationMixin, name):
        cache.note_extended(before, model_kwargs.get("attention_mask"))
    return model_kwargs


def decodes_eagerly(model: PreTrainedModel, cache: PagedCache) -> bool:
    """Whether decode steps cannot be compiled. The reason is logged, once for a model."""
    if EAGER_BECAUSE in vars(model):
        return True
    reason = cache.not_compiled_because()
    if has_forwards_of_ours(model):
        reason = reason or model.config._attn_implementation.eager_because
    if not getattr(model, "_can_compile_fullgraph", False):
        reason = "transformers does not mark it as one that can be compiled in one graph"
    if reason is not None:
        _stay_eager(model, reason)
    return reason is not None


def _stay_eager(model: PreTrainedModel, reason: str) -> None:
    setattr(model, EAGER_BECAUSE, reason)
    logger.warning("%s decodes without torch.compile: %s", type(model).__name__, reason)


def _forward(model: PreTrainedModel, compiled: Callable, graphs: _Graphs, **kwargs: Any) -> Any:
    """A forward pass of a generate() call that compiles."""
    cache = _bare_cache(kwargs)
    if cache is None:
        return compiled(**kwargs)
    if not may_compile(model, cache, (), kwargs):
        return model(**kwargs)
    compiled = graphs.find(model, *_ids_of((), kwargs).shape[:2])
    if compiled is None:
        return model(**kwargs)
    cache.enter_pass()
    try:
        prepared = prepare_step(model, cache, (), kwargs, by_hooks=False)
        if prepared is not None:
            return end_step(step_cache_of(prepared), compiled(**prepared))
    except CANNOT_COMPILE as error:
        _stay_eager(model, _first_line(error))
    except BaseException:
        cache.leave_pass(failed=True)
        raise
    cache.leave_pass(failed=True)
    return model(**kwargs)


def may_compile(model: PreTrainedModel, cache: PagedCache, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a forward pass may be a compiled step, by what can be told before its masks are made."""
    ids = _ids_of(args, kwargs)
    return (
        isinstance(ids, torch.Tensor)
        and ids.shape[1] <= MAX_QUERIES
        and cache.batch_size == ids.shape[0]
        and len(args) < 2
        and not torch.is_grad_enabled()
        and kwargs.get("use_cache") is not False
        and not kwargs.get("output_attentions")
        and not decodes_eagerly(model, cache)
    )


def prepare_step(
    model: PreTrainedModel, cache: PagedCache, args: tuple, kwargs: dict[str, Any], *, by_hooks: bool
) -> dict[str, Any] | None:
    """Begin a step.

    Args:
        args, kwargs: of the forward pass, for which `may_compile` is true.
        by_hooks: the hooks around the forward pass end the step.

    Returns:
        The keyword arguments for a graph, or None where this step must run without one; what was begun is to be undone
        then.
    """
    ids, mask = _ids_of(args, kwargs), kwargs.get("attention_mask")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2):
        return None
    token_types = {name: kwargs.get(name) for name in TOKEN_TYPES}
    if cache.only_extends(mask) and all(types is None for types in token_types.values()):
        cache.begin_extended(ids.shape[0])
    else:
        create = getattr(model, "create_masks_for_generate", create_masks_for_generate)
        if has_forwards_of_ours(model):  # Bloom makes none there
            create = create_masks_for_generate
        create(
            config=model.config,
            inputs_embeds=torch.empty((*ids.shape[:2], 0), dtype=model.dtype, device=ids.device),
            attention_mask=mask,
            position_ids=kwargs.get("position_ids"),
            is_first_iteration=False,
            **token_types,
            **{cache_keyword(model): cache},
        )
    step_cache = cache.step_cache()
    if step_cache is None:
        if not cache.has_plain_step:
            _stay_eager(model, "its masks say more than causal order, a window and the padding")
        return None
    step_cache.by_hooks = by_hooks
    prepared = {
        name: step_cache if value is cache else value for name, value in kwargs.items() if name not in NOT_FOR_MODELS
    }
    # Bloom and Falcon count the tokens of a mask, and forwards of ours need none.
    prepared["attention_mask"] = None if has_forwards_of_ours(model) else step_cache.mask
    return prepared


def end_step(step_cache: StepCache, output: Any) -> Any:
    """End a step whose graph has run, or has failed and gave no output.

    Returns:
        The output, with the cache in place of what the graph was given.
    """
    cache, step_cache.user = step_cache.user, None
    if output is None:
        cache.leave_pass(failed=True)
        return None
    cache.graph_has_run()
    cache.leave_pass(failed=False)
    if isinstance(output, tuple):
        return tuple(cache if value is step_cache else value for value in output)
    for name, value in list(output.items()):
        if value is step_cache:
            output[name] = cache
    return output


class _EagerPasses:
    """Forward passes that run without torch.compile although the user has compiled the model's forward()."""

    def __init__(self) -> None:
        self._lock, self._count, self._stance = threading.Lock(), 0, None

    def begin(self) -> None:
        with self._lock:
            if not self._count:
                self._stance = torch.compiler.set_stance("force_eager")
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._stance.__exit__(None, None, None)


_eager_passes = _EagerPasses()


def run_eagerly(cache: PagedCache) -> None:
    """Let the forward pass that has just begun run as if its forward() were not compiled: it is a prompt, or what else
    no graph can run, and would be one graph after the other, or an error where fullgraph=True."""
    _eager_passes.begin()
    cache.after_pass = _eager_passes.end


def step_cache_of(kwargs: dict[str, Any]) -> StepCache | None:
    """What stands for a PagedCache among the arguments of a forward pass."""
    for name in ("cache", "past_key_values"):
        if isinstance(kwargs.get(name), StepCache):
            return kwargs[name]
    return None


def _ids_of(args: tuple, kwargs: dict[str, Any]) -> Any:
    """`input_ids`, or `inputs_embeds`."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    return kwargs.get("inputs_embeds") if ids is None else ids


def _bare_cache(kwargs: dict[str, Any]) -> PagedCache | None:
    """The PagedCache among the arguments, unless it is one of an encoder-decoder's pair."""
    cache = cache_of(kwargs)
    return cache if any(value is cache for value in kwargs.values()) else None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
