"""Feeding packed steps to a model, and finding out whether it takes them right."""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_paged.allocator import BlockTable
from hf_paged.errors import OutOfBlocksError
from hf_paged.layer_kinds import group_layers, is_recurrent, layer_kinds
from hf_paged.models import cache_keyword, input_device
from hf_paged.packed import PackedCache, PackedStep, running
from hf_paged.pool import BlockPool

PROBE_LENGTHS = (7, 3, 9)
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
TOLERANCE_OTHERWISE = 0.25
"""Relative error of a position's logits. Rounding in half precision gives a few percent; a token that sees another
sequence, or has the position of another, is off by as much as the logits themselves."""


class PackedRunner:
    """A model that is fed packed steps over a pool.

    Args:
        model: enabled for paged attention.
        pool: its blocks.
        tokenizer: if the model's own generation config has stop strings.

    Raises:
        NotImplementedError: the model cannot take packed sequences; the message says why.
    """

    def __init__(self, model: PreTrainedModel, pool: BlockPool, tokenizer: Any = None) -> None:
        if (reason := _why_not(model)) is not None:
            raise refusal(model, reason)
        kinds, kwargs = layer_kinds(model.config)
        if recurrent := sorted({kind for kind in kinds if is_recurrent(kind)}):
            reason = f"it has layers of kind {', '.join(recurrent)}, whose states would run from one row into the next"
            raise refusal(model, reason)
        pool.bind(group_layers(kinds, kwargs))
        self.model, self.pool, self.tokenizer = model, pool, tokenizer
        self.device = input_device(model)
        self._cache = PackedCache(pool, len(kinds))
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._takes_positions = "position_ids" in parameters or takes_any
        self._counters = [] if "position_ids" in parameters else _modules_that_count(model)
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._options = {cache_keyword(model): self._cache, "use_cache": True, "return_dict": True}

    @torch.no_grad()
    def forward(self, step: PackedStep, ids: list[int], wanted: np.ndarray) -> torch.Tensor:
        """Feed a step.

        Args:
            ids: of all its tokens.
            wanted: `[n]`: tokens of the packed input whose logits are asked for.

        Returns:
            `[n, vocabulary]` logits on `device`.

        Raises:
            NotImplementedError: the model attends in a way that packed steps do not have.
        """
        cache, keep = self._cache, torch.from_numpy(wanted).to(self.device)
        options, positions = dict(self._options), torch.from_numpy(step.positions).to(self.device, torch.long)
        if self._takes_positions:
            options["position_ids"] = positions[None]
        options |= self.beside(positions)
        if self._takes_logits_to_keep:
            # Models want one number at least.
            options["logits_to_keep"] = keep if len(wanted) else torch.zeros(1, dtype=torch.long, device=self.device)
        cache.begin(step)
        try:
            with _counting(self._counters, cache, positions):
                output = self.model(input_ids=torch.tensor([ids], dtype=torch.long, device=self.device), **options)
            cache.check_read()
        finally:
            cache.end()
        logits = output.logits[0]
        if not len(wanted):
            return logits[:0].to(self.device)
        if len(logits) == step.num_tokens != len(wanted) or not self._takes_logits_to_keep:
            logits = logits[keep.to(logits.device)]
        return logits.to(self.device)

    def beside(self, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """What generate() gives the model beside these tokens.

        Args:
            positions: `[tokens]` long: the place of each in its sequence.
        """
        return {given.name: given.at(positions) for given in _given_by_generate(self.model, self.tokenizer)}

    def size_pool(self) -> None:
        """Feed one token, and take it back: a pool without a number of blocks settles it when it sees keys."""
        tables = [BlockTable() for _ in self.pool.groups]
        step = PackedStep(self.pool, [tables], [1])
        try:
            self.forward(step, _probe_sequences(self.model)[0][:1], np.zeros(1, np.int64))
        finally:
            step.undo()


@dataclass(frozen=True)
class _Given:
    """An input that generate() gives beside the tokens: one number for every token, or its position and a number.

    Attributes:
        first: `[..., 1]`: of a sequence's first token.
        counts: whether it grows with the position.
    """

    name: str
    first: torch.Tensor
    counts: bool

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """`[..., tokens]`"""
        return (self.first.to(positions.device) + positions * self.counts).to(self.first.dtype)


class _Caught(BaseException):
    """Ends a call of generate() before its forward pass."""


_given: weakref.WeakKeyDictionary[PreTrainedModel, list[_Given]] = weakref.WeakKeyDictionary()
_BESIDE = ("input_ids", "attention_mask", "cache_position", "labels")
"""Inputs with something for each token that packed steps do not take from generate()."""


def _given_by_generate(model: PreTrainedModel, tokenizer: Any = None) -> list[_Given]:
    """What generate() gives a model with every token of a text: positions, which some models begin at 1 or want in
    several dimensions, and types of tokens.

    Raises:
        NotImplementedError: an input that follows from no token's position.
    """
    if model in _given:
        return _given[model]
    caught: dict[str, Any] = {}
    mine = threading.get_ident()

    def catch(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != mine:
            return  # another thread's pass
        caught.update(kwargs)
        raise _Caught

    ids = torch.tensor([_probe_sequences(model)[-1]], device=input_device(model))
    options = {"num_beams": 1, "num_return_sequences": 1, "max_new_tokens": 1, "use_cache": True, "pad_token_id": 0}
    hook = model.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        with contextlib.suppress(_Caught):
            model.generate(ids, attention_mask=torch.ones_like(ids), tokenizer=tokenizer, **options)
    finally:
        hook.remove()
    length, found = ids.shape[1], []
    for name, value in caught.items():
        is_tensor = isinstance(value, torch.Tensor) and value.ndim > 1 and not value.dtype.is_floating_point
        if name in _BESIDE or not is_tensor or value.shape[-1] != length:
            continue
        found.append(_Given(name, value[..., :1].clone(), bool((value[..., 1] != value[..., 0]).any())))
        if not torch.equal(found[-1].at(torch.arange(length, device=value.device)), value):
            raise NotImplementedError(f"generate() gives it {name} that do not follow from the positions of tokens")
    _given[model] = found
    return found


def _modules_that_count(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Embeddings of positions that count from the length of the cache, and can be told positions instead."""
    known = [(module, inspect.signature(type(module).forward).parameters) for module in model.modules()]
    lengths = {"cache_length", "past_key_values_length"}
    return [module for module, names in known if "position_ids" in names and lengths & names.keys()]


@contextlib.contextmanager
def _counting(modules: list[torch.nn.Module], cache: PackedCache, positions: torch.Tensor) -> Iterator[None]:
    """Within, these modules are told positions, in the step of this cache alone: other threads use the model too."""

    def tell(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if running.get() is not cache:
            return None
        told = kwargs.get("position_ids")  # by the model, which has counted too
        return args, kwargs | {"position_ids": positions[None] if told is None else positions.expand_as(told)}

    hooks = [module.register_forward_pre_hook(tell, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


_checked: weakref.WeakKeyDictionary[PreTrainedModel, torch.dtype] = weakref.WeakKeyDictionary()


def check_packing(model: PreTrainedModel, tokenizer: Any = None) -> None:
    """Compare packed steps with a model's own forward pass, given what generate() gives, once for a model.

    Three short sequences are fed side by side, and then more tokens of each, in each other's company. Each position's
    logits must be those of the sequence alone.

    Args:
        model: enabled for paged attention.

    Raises:
        NotImplementedError: they are not, or the model does something that packed steps do not have, or does not run
            with tokens alone.
    """
    if _checked.get(model) == model.dtype:
        return
    sequences, pool = _probe_sequences(model), BlockPool(block_size=16, num_blocks=len(PROBE_LENGTHS))
    runner = PackedRunner(model, pool, tokenizer)
    tables = [[BlockTable() for _ in pool.groups] for _ in sequences]
    fed = [0] * len(sequences)
    doing = "it does not run with tokens alone"
    try:
        with torch.no_grad():
            inputs = [torch.tensor([tokens], device=runner.device) for tokens in sequences]
            beside = [runner.beside(torch.arange(len(tokens), device=runner.device)) for tokens in sequences]
            alone = [model(ids, use_cache=False, **given).logits[0] for ids, given in zip(inputs, beside, strict=True)]
        doing = "it fails when several sequences are fed side by side"
        for counts in ([5, 1, 7], [1, 1, 0], [1, 1, 2]):
            order = sorted((i for i, count in enumerate(counts) if count), key=lambda i: counts[i] != 1)
            step = PackedStep(pool, [tables[i] for i in order], [counts[i] for i in order])
            ids = [token for i in order for token in sequences[i][fed[i] : fed[i] + counts[i]]]
            logits, start = runner.forward(step, ids, np.arange(len(ids))), 0
            for i in order:
                _compare(alone[i][fed[i] : fed[i] + counts[i]], logits[start : start + counts[i]])
                start, fed[i] = start + counts[i], fed[i] + counts[i]
    except NotImplementedError as error:
        raise refusal(model, str(error)) from error
    except (OutOfBlocksError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        told = " ".join(str(error).split())
        raise refusal(model, f"{doing} ({type(error).__name__}: {told[:200]})") from error
    _checked[model] = model.dtype


def _compare(alone: torch.Tensor, packed: torch.Tensor) -> None:
    limit = TOLERANCE.get(packed.dtype, TOLERANCE_OTHERWISE)
    alone, packed = alone.to(packed.device).double(), packed.double()
    error = float(((packed - alone).norm(dim=-1) / alone.norm(dim=-1).clamp(min=1e-9)).max())
    if not error <= limit:
        raise NotImplementedError(
            f"its tokens do not keep to their own sequence when several are fed side by side (logits differ by "
            f"{error:.1e} from those of each sequence alone)"
        )


def refusal(model: PreTrainedModel, reason: str) -> NotImplementedError:
    return NotImplementedError(
        f"{type(model).__name__} cannot be batched continuously: {reason}. Use model.generate(), with a PagedCache"
    )


def _why_not(model: PreTrainedModel) -> str | None:
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if not model.can_generate():
        return "it does not generate text"
    if not isinstance(getattr(model.get_input_embeddings(), "weight", None), torch.Tensor):
        return "it has no single table of embeddings for the tokens of a text"
    if model.training:
        return "it is in training mode; call model.eval()"
    return None


def _probe_sequences(model: PreTrainedModel) -> list[list[int]]:
    """Token ids that mean nothing special to the model."""
    config = model.config.get_text_config(decoder=True)
    special = {
        token
        for some in (model.config, config, model.generation_config)
        for name, value in vars(some).items()
        if name.endswith(("token_id", "token_index"))
        for token in (value if isinstance(value, list) else [value])
    }
    size = model.get_input_embeddings().weight.shape[0]
    usable = [token for token in range(min(size, 4096)) if token not in special]
    generator = np.random.default_rng(0)
    return [[usable[i] for i in generator.integers(len(usable), size=length)] for length in PROBE_LENGTHS]


def position_limit(model: PreTrainedModel) -> tuple[int, str] | None:
    """The longest sequence that rows of one packed step may have, and why, if there is one: beyond it rotary
    frequencies change for all rows, or there is no embedding of a position."""
    config = model.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "max_target_positions", None)
    rope = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    if "longrope" in rope or "dynamic" in rope:
        parameters = getattr(config, "rope_parameters", None) or {}
        limit = getattr(config, "original_max_position_embeddings", None)
        limit = parameters.get("original_max_position_embeddings") or limit or positions
        return limit, "the rotary frequencies of all rows of a step change with the longest of them"
    if positions and rope in ("None", "{}"):
        if hasattr(config, "rotary_dim"):
            return positions, "it has no rotary frequencies for later positions"
        words = model.get_input_embeddings()
        embeddings = [m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m is not words]
        tables = [module.weight for module in embeddings] + [b for b in model.buffers() if b.is_floating_point()]
        if any(table.ndim == 2 and 0 <= len(table) - positions <= 8 for table in tables):
            return positions, "it has no embeddings for later positions"
    return None
