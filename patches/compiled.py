"""Compiled decode steps.

generate() compiles the forward pass where transformers' criteria and its own cache say so. The graph is then given a
`StepCache`, filled for the step, in place of the `PagedCache`. The masks are made before it, outside, as transformers
does for caches of a static shape: that begins the step, and says whether the kernel expresses all they mean.

A model that the user has compiled is handled likewise, in the hooks around its forward pass.
"""

from __future__ import annotations

import copy
import functools
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
from hf_paged.step_cache import MAX_QUERIES, NoKernelError, StepCache

logger = logging.getLogger("hf_paged")

COMPILES = "_hf_paged_compiles"
"""Attribute of an enabled model: whether generate() compiles decode steps; None for where transformers would."""
EAGER_BECAUSE = "_hf_paged_eager_because"
"""Attribute of an enabled model: the reasons for which decode steps were not compiled, each of which was said once."""
GRAPHS = "_hf_paged_graphs"
"""Attribute of an enabled model: its `_Graphs`."""
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "block_sequence_ids")
"""Arguments that some models make masks from."""
NOT_FOR_MODELS = ("tokenizer", "assistant_tokenizer")
"""Arguments that generate() passes on although no model takes them, and no graph can."""
CANNOT_COMPILE = (
    TorchDynamoException,
    ConstraintViolationError,
    getattr(torch._dynamo.exc, "FailOnRecompileLimitHit", TorchDynamoException),
    NoKernelError,
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
    with cache.compiled.asked_for():
        return original(model_kwargs, generation_config)


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
        self._calls: dict[tuple[int, bool], Callable | None] = {}  # None: it cannot be compiled
        self._runs: dict[tuple[int, bool], int] = {}
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict) -> _Graphs:
        return _Graphs(self.config)  # what was compiled is the other model

    @staticmethod
    def shape(ids: torch.Tensor) -> tuple[int, bool]:
        """What has a graph: a batch size, with one token a row or with several, whatever their number."""
        return ids.shape[0], ids.shape[1] > 1

    def find(self, model: PreTrainedModel, shape: tuple[int, bool]) -> Callable | None:
        """The compiled forward pass for steps of this shape; None where it cannot be compiled, or there are as many as
        there may be."""
        if shape in self._calls:
            return self._calls[shape]
        limit = getattr(torch._dynamo.config, "recompile_limit", 8)
        if len(self._calls) >= limit:
            _say_once(
                model,
                f"it has been compiled for {limit} shapes of steps, and torch._dynamo.config.recompile_limit allows no "
                "more; steps of other batch sizes run eagerly",
            )
            return None
        with self._lock:
            return self._calls.setdefault(shape, torch.compile(_code_of_its_own(model), **self.config.to_dict()))

    def give_up(self, shape: tuple[int, bool]) -> None:
        """Run steps of this shape eagerly from now on."""
        self._calls[shape] = None

    def is_new(self, shape: tuple[int, bool]) -> bool:
        """Whether a graph is still being made: the first run compiles, and the next two warm up and record a CUDA
        graph."""
        return self._runs.get(shape, 0) < 3

    @contextmanager
    def running(self, shape: tuple[int, bool]) -> Iterator[None]:
        """Within, the graph of a shape runs; for the first time in one thread, since several would each compile it."""
        runs = self._runs.get(shape, 0)
        with self._lock if not runs else nullcontext():
            yield
        if not runs:
            # Compilation leaves frames in reference cycles, and each holds its callers', down to generate() and its
            # cache. torch collects the young ones; the others would hold blocks until a full collection.
            gc.collect()
        if runs < 3:
            self._runs[shape] = runs + 1


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
        cache.compiled.note_extended(before, model_kwargs.get("attention_mask"))
    return model_kwargs


def _forward(model: PreTrainedModel, compiled: Callable, graphs: _Graphs, **kwargs: Any) -> Any:
    """A forward pass of a generate() call that compiles."""
    cache = _bare_cache(kwargs)
    if cache is None:
        return compiled(**kwargs)
    call = None
    if may_compile(model, cache, (), kwargs):
        shape = graphs.shape(_ids_of((), kwargs))
        call = graphs.find(model, shape)
    if call is None:
        return model(**kwargs)
    cache.enter_pass()
    try:
        prepared = prepare_step(model, cache, (), kwargs, by_hooks=False)
        if prepared is not None:
            try:
                with graphs.running(shape):
                    output = call(**prepared)
                return end_step(step_cache_of(prepared), output)
            except (*CANNOT_COMPILE, RuntimeError) as error:
                # What goes wrong while a graph is made (a compiler that is missing, memory, a capture that is not
                # allowed) need not go wrong without one. If it does, it is raised then.
                if not isinstance(error, CANNOT_COMPILE) and not graphs.is_new(shape):
                    raise
                graphs.give_up(shape)
                _say_once(model, _reason(error))
    finally:
        cache.leave_pass(failed=True)  # if the step has not ended
    return model(**kwargs)


def may_compile(model: PreTrainedModel, cache: PagedCache, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a forward pass may be a compiled step, by what can be told before its masks are made. Where it is one
    that other models would compile, the reason why not is said, once."""
    ids = _ids_of(args, kwargs)
    if (
        not isinstance(ids, torch.Tensor)
        or ids.shape[1] > MAX_QUERIES
        or cache.batch_size != ids.shape[0]
        or len(args) > 1
        or torch.is_grad_enabled()
        or model.training
        or kwargs.get("use_cache") is False
        or kwargs.get("output_attentions")
    ):
        return False
    if not getattr(model, "_can_compile_fullgraph", False):
        reason = "transformers does not mark it as one that can be compiled in one graph"
    else:
        reason = cache.compiled.impossible_because()
        if has_forwards_of_ours(model):
            reason = reason or model.config._attn_implementation.eager_because
    if reason is not None:
        _say_once(model, reason)
    return reason is None


def _say_once(model: PreTrainedModel, reason: str) -> None:
    said = vars(model).setdefault(EAGER_BECAUSE, set())
    if reason not in said:
        said.add(reason)
        logger.warning("%s decodes without torch.compile: %s", type(model).__name__, reason)


def _reason(error: BaseException) -> str:
    """What an error of torch.compile says, in one line: the first of its text, and what torch adds for developers,
    which names an exception within the graph."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    context = [line for line in lines[1:] if line.startswith("Developer debug context:")]
    return ". ".join([f"{type(error).__name__}: {lines[0] if lines else ''}", *context[:1]])[:500]


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
    if by_hooks and kwargs.get("position_ids") is None and cache.has_padding:
        return None  # the model would take positions from a mask that graphs are not given
    token_types = {name: kwargs.get(name) for name in TOKEN_TYPES}
    only_extends = cache.compiled.only_extends(mask) and ids.shape[1] == 1
    if only_extends and all(types is None for types in token_types.values()):
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
    step_cache = cache.compiled.step_cache()
    if step_cache is None:
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

    Raises:
        NoKernelError: the model changed keys after updating the cache, as it had not done before; the step is undone.
    """
    cache = step_cache.take_user()
    if output is None:
        cache.leave_pass(failed=True)
        return None
    if step_cache.unread is not None:
        cache.note_changed_keys()
        raise NoKernelError(
            "the model changed keys after updating the cache, which it had not done before; run the step again"
        )
    cache.graph_has_run()
    cache.leave_pass(failed=False)
    if isinstance(output, tuple):
        return tuple(cache if value is step_cache else value for value in output)
    for name, value in list(output.items()):
        if value is step_cache:
            output[name] = cache
        elif name == "hidden_states" and value is not None:
            # generate() keeps them, and a CUDA graph writes the next step's to the same places.
            output[name] = tuple(
                state.clone() if isinstance(state, torch.Tensor) and state.device.type != "cpu" else state
                for state in value  # None for layers that were not asked for
            )
    return output


class _EagerPasses:
    """Forward passes that run without torch.compile although the user has compiled the model's forward(). A thread has
    one at a time; torch's switch is one for the process."""

    def __init__(self) -> None:
        self._lock, self._open, self._stance = threading.Lock(), {}, None

    def begin(self) -> Callable[[], None]:
        """
        Returns:
            What ends it.
        """
        thread, mine = threading.get_ident(), object()
        with self._lock:
            if not self._open:
                self._stance = torch.compiler.set_stance("force_eager")
            self._open[thread] = mine  # in place of one that was interrupted, which nobody is told of

        def end() -> None:
            with self._lock:
                if self._open.get(thread) is mine:
                    del self._open[thread]
                    if not self._open:
                        self._stance.__exit__(None, None, None)

        return end


_eager_passes = _EagerPasses()


def run_eagerly(cache: PagedCache) -> None:
    """Let the forward pass that has just begun run as if its forward() were not compiled: it is a prompt, or what else
    no graph can run, and would be one graph after the other, or an error where fullgraph=True."""
    cache.after_pass = weakref.finalize(cache, _eager_passes.begin())  # called once, at the latest with the cache's end


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
