"""Feeding packed steps to a model, and finding out whether it takes them right."""

from __future__ import annotations

import inspect

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_paged.allocator import BlockTable
from hf_paged.layer_kinds import group_layers, is_recurrent, layer_kinds
from hf_paged.models import cache_keyword
from hf_paged.packed import PackedCache, PackedStep
from hf_paged.pool import BlockPool

CHECKED = "_hf_paged_packs"
"""Attribute of an enabled model that was found to take packed sequences right."""
PROBE_LENGTHS = (5, 1, 7)
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
TOLERANCE_OTHERWISE = 0.25
"""Relative error of a position's logits. Rounding in half precision gives a few percent; a token that sees another
sequence, or has the position of another, is off by as much as the logits themselves."""


class PackedRunner:
    """A model that is fed packed steps over a pool.

    Args:
        model: enabled for paged attention.
        pool: its blocks.

    Raises:
        NotImplementedError: the model cannot take packed sequences; the message says why.
    """

    def __init__(self, model: PreTrainedModel, pool: BlockPool) -> None:
        reason = _why_not(model)
        kinds, kwargs = ([], []) if reason else layer_kinds(model.config)
        if reason is None and (recurrent := sorted({kind for kind in kinds if is_recurrent(kind)})):
            reason = f"it has layers of kind {', '.join(recurrent)}, whose states would run from one row into the next"
        if reason is not None:
            raise refusal(model, reason)
        pool.bind(group_layers(kinds, kwargs))
        self.model, self.pool = model, pool
        self.device = model.get_input_embeddings().weight.device
        self._cache = PackedCache(pool, len(kinds))
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
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
        options = dict(self._options)
        if self._takes_positions:
            options["position_ids"] = torch.from_numpy(step.positions).to(self.device, torch.long)[None]
        if self._takes_logits_to_keep:
            # Models want one number at least.
            options["logits_to_keep"] = keep if len(wanted) else torch.zeros(1, dtype=torch.long, device=self.device)
        cache.begin(step)
        try:
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

    def check(self) -> None:
        """Compare packed steps with the model's own forward pass, once for a model.

        Three short sequences are fed side by side, and then a token more of each, some in the company of a stretch of
        another. Each position's logits must be those of the sequence alone.

        Raises:
            NotImplementedError: they are not, or the model does something that packed steps do not have.
        """
        if vars(self.model).get(CHECKED) == self.pool.groups and self.pool.is_sized:
            return
        sequences = _probe_sequences(self.model)
        tables = [[BlockTable() for _ in self.pool.groups] for _ in sequences]
        try:
            with torch.no_grad():
                alone = [
                    self.model(torch.tensor([s], device=self.device), use_cache=False).logits[0] for s in sequences
                ]
            first = [len(s) - 2 if len(s) > 2 else 1 for s in sequences]
            fed = [0] * len(sequences)
            for counts in (first, [1, 1, 0], [1, 0, 2]):
                order = [i for i in range(len(counts)) if counts[i] == 1] + [
                    i for i in range(len(counts)) if counts[i] > 1
                ]
                step = PackedStep(self.pool, [tables[i] for i in order], [counts[i] for i in order])
                ids = [token for i in order for token in sequences[i][fed[i] : fed[i] + counts[i]]]
                logits = self.forward(step, ids, np.arange(len(ids)))
                start = 0
                for i in order:
                    self._compare(alone[i][fed[i] : fed[i] + counts[i]], logits[start : start + counts[i]])
                    start, fed[i] = start + counts[i], fed[i] + counts[i]
        except NotImplementedError as error:
            raise refusal(self.model, str(error)) from error
        finally:
            with self.pool.lock:
                for allocator, group in zip(self.pool.allocators, zip(*tables, strict=True), strict=False):
                    for table in group:
                        allocator.release(table)
        setattr(self.model, CHECKED, self.pool.groups)

    def _compare(self, alone: torch.Tensor, packed: torch.Tensor) -> None:
        difference = (packed.double() - alone.to(packed.device).double()).norm(dim=-1)
        error = float((difference / alone.double().norm(dim=-1).clamp(min=1e-9).to(packed.device)).max())
        if not error <= TOLERANCE.get(alone.dtype, TOLERANCE_OTHERWISE):
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
    if not model.can_generate() or model.get_input_embeddings() is None:
        return "it does not generate text"
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
    lengths = [length + 2 for length in PROBE_LENGTHS]
    return [[usable[i] for i in generator.integers(len(usable), size=length)] for length in lengths]


def position_limit(model: PreTrainedModel) -> tuple[int, str] | None:
    """The longest sequence that rows of one packed step may have, and why, if there is one: beyond it rotary
    frequencies change for all rows, or there is no embedding of a position."""
    config = model.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None)
    rope = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    if "longrope" in rope or "dynamic" in rope:
        parameters = getattr(config, "rope_parameters", None) or {}
        limit = getattr(config, "original_max_position_embeddings", None)
        limit = parameters.get("original_max_position_embeddings") or limit or positions
        return limit, "the rotary frequencies of all rows of a step change with the longest of them"
    if positions and rope in ("None", "{}"):
        words = model.get_input_embeddings()
        for module in model.modules():
            if (
                isinstance(module, torch.nn.Embedding)
                and module is not words
                and 0 <= module.num_embeddings - positions <= 8
            ):
                return positions, "it has no embeddings for later positions"
        if hasattr(config, "rotary_dim"):
            return positions, "it has no rotary frequencies for later positions"
    return None
