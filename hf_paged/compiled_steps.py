"""Which decode steps with a cache can be compiled, and what a graph is given for one.

`hf_paged.patches.compiled` asks; `hf_paged.step_cache` is what the graph is given.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_paged.layer import PagedLayer
from hf_paged.rows import Rows
from hf_paged.step_cache import StepCache

if TYPE_CHECKING:
    from hf_paged.cache import PagedCache


class CompiledSteps:
    """What is known of one cache for steps that are compiled, and remembered from step to step.

    Args:
        cache: held weakly, since it holds this object.
        rows, layers: of the cache.

    Attributes:
        are_asked_for: transformers is told that decode steps with the cache can be compiled.
    """

    def __init__(self, cache: weakref.ref[PagedCache], rows: Rows, layers: list[Any]) -> None:
        self._cache, self._rows, self._layers = cache, rows, layers
        self.are_asked_for = False
        self._masks_say_more = False  # than causal order, windows and the padding, in a step that might be compiled
        self._mask_before = self._known_mask = _NO_MASK  # of the step before, as it was passed, and of the one to come

    @contextmanager
    def asked_for(self) -> Iterator[None]:
        """Within, transformers is told that decode steps with the cache can be compiled."""
        self.are_asked_for = True
        try:
            yield
        finally:
            self.are_asked_for = False

    def impossible_because(self) -> str | None:
        """Why decode steps with the cache cannot be compiled, or None as far as is known."""
        if self._rows.always_dense:
            return "a layer changed its keys or values after updating the cache"
        if self._rows.has_state:
            return "the state of its linear attention layers is in the cache"
        if self._masks_say_more:
            return "its masks say more than causal order, a window and the padding"
        step = self._rows.step
        was_seen = step is not None and step.closed and step.sees_mask
        for layer in self._paged_layers():
            if layer.hands_over is False or (was_seen and layer.hands_over is None):
                return f"layer {layer.index} changes its keys or values after updating the cache"
            if layer.backend is not None and not layer.backend.serves_graphs(layer.device):
                return f"the {layer.backend.name} kernels cannot be part of a compiled step on {layer.device.type}"
        return None

    def step_cache(self) -> StepCache | None:
        """What the graph is to be given for the step that was begun, its tensors filled; None where this step must run
        without one."""
        rows, step = self._rows, self._rows.step
        if step is None or step.closed:  # the masks were made in a way that did not begin one
            return None
        if step.other_masks or len(step.plain_groups) != len(rows.pool.groups):
            self._masks_say_more = True
            return None
        if (
            not step.allocated
            or step.must_be_dense
            or step.was_empty
            or any(mask is not None for mask in step.masks.values())
        ):
            return None
        paged = self._paged_layers()
        if not all(layer.is_initialized and layer.hands_over for layer in paged):
            return None  # before a first pass it is not known what the model does with what an update gives it
        # A thread, and a stream, has its own: the tensors of a step must stay until it has run.
        device, shape = paged[0].device, (rows.num_rows, step.q_len)
        key = (
            threading.get_ident(),
            torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0,
            *shape,
            tuple((layer.backend.name, layer.backend.graph_key()) for layer in paged),
        )
        found = rows.pool.step_cache(key, lambda: StepCache(self._layers, *shape, rows.pool.block_size))
        cache = self._cache()
        if found.is_used_by_another(cache):
            return None
        found.prepare(cache, step)
        step.in_graph = True
        return found

    def only_extends(self, mask: torch.Tensor | None) -> bool:
        """Whether `mask`, of the step to come, is known to be that of the step before, which a graph ran, and a 1 in
        every row. Then it need not be read, which waits for the device."""
        step, known = self._rows.step, self._known_mask
        self._mask_before, self._known_mask = _MaskSeen.of(mask), _NO_MASK
        return (
            mask is not None
            and known.is_still(mask)
            and step is not None
            and step.in_graph
            and mask.shape == (self._rows.num_rows, step.end + 1)
        )

    def note_extended(self, before: Any, after: Any) -> None:
        """Note that `after` is the mask `before` and a 1 in every row, if that was the mask of the last step."""
        if before is not None and self._mask_before.is_still(before):
            self._known_mask = _MaskSeen.of(after)

    def _paged_layers(self) -> list[PagedLayer]:
        return [layer for layer in self._layers if isinstance(layer, PagedLayer)]


class _MaskSeen(NamedTuple):
    """A mask, weakly, and torch's count of writes to it."""

    tensor: Callable[[], torch.Tensor | None]
    version: int

    @classmethod
    def of(cls, mask: torch.Tensor | None) -> _MaskSeen:
        if mask is None or mask.is_inference():  # writes to it are not counted
            return _NO_MASK
        return cls(weakref.ref(mask), mask._version)

    def is_still(self, mask: torch.Tensor) -> bool:
        return self.tensor() is mask and self.version == mask._version


_NO_MASK = _MaskSeen(lambda: None, 0)
