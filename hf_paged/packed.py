"""A forward pass over several sequences of unequal length, laid side by side in one row.

The tokens of all sequences form one input of shape `[1, tokens]`, so that nothing is padded: first one token of each
sequence that decodes, then stretches of prompts. All of a transformer but attention looks at one token at a time and
does not know the difference; attention is told here where each sequence's tokens stand and which blocks they see. It is
the input of continuous batching (Orca, OSDI 2022; vLLM, arXiv 2309.06180).

A `PackedCache` is given to the model in place of a cache. It stores what a layer updates and leaves a handle for the
attention function, as `PagedLayer` does. There is no dense way here: what no kernel expresses is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_paged.allocator import BlockTable, Growth
from hf_paged.kernels import select
from hf_paged.layer import HANDLE, copy_shared
from hf_paged.plan import GroupPlan, send_together
from hf_paged.pool import BlockPool
from hf_paged.storage import LayerStorage


class Segment:
    """Tokens that a kernel takes in one launch: one token each of several sequences, or several of one.

    Attributes:
        start, stop: where they stand in the packed input.
        rows, q_len: their shape for the kernels; `rows * q_len` is `stop - start`, and one of the two is 1.
        plans: by group of layers and device.
    """

    __slots__ = ("plans", "q_len", "rows", "start", "stop")

    def __init__(self, start: int, rows: int, q_len: int) -> None:
        self.start, self.stop, self.rows, self.q_len = start, start + rows * q_len, rows, q_len
        self.plans: dict[tuple[int, torch.device], GroupPlan] = {}

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """The segment's part of `[1, heads, tokens, dim]`, as `[rows, heads, q_len, dim]`; a view."""
        part = tensor[:, :, self.start : self.stop]
        return part if self.rows == 1 else part[0].transpose(0, 1).unsqueeze(2)


class PackedStep:
    """Which tokens of which sequences one forward pass is given, and the blocks they are allotted.

    Args:
        pool: whose blocks they are.
        tables: `[sequences][groups]`: the block tables, each used at most once. Sequences with one new token come
            first.
        counts: new tokens of each sequence, at least 1.

    Attributes:
        num_tokens: new tokens of all sequences.
        positions: `[tokens]` int32: the place of each token in its sequence.
        segments: what the kernels are launched for.
        allocated: whether the blocks have been found.
    """

    def __init__(self, pool: BlockPool, tables: Sequence[Sequence[BlockTable]], counts: Sequence[int]) -> None:
        self.pool, self.counts, self._sequences = pool, list(counts), tables
        self.starts = [row[0].length for row in tables]
        self.num_tokens = sum(counts)
        self.positions = np.concatenate(
            [np.arange(start, start + count, dtype=np.int32) for start, count in zip(self.starts, counts, strict=True)]
        )
        singles = next((i for i, count in enumerate(counts) if count != 1), len(counts))
        self.segments = [Segment(0, singles, 1)] if singles else []
        for count in counts[singles:]:
            self.segments.append(Segment(self.segments[-1].stop if self.segments else 0, 1, count))
        self._context_lens = np.asarray(self.starts, np.int32) + np.asarray(counts, np.int32)
        self._growths: list[Growth] = []
        self.allocated = False

    def allocate(self) -> None:
        """Find the blocks of all tokens, or leave everything as it was.

        Raises:
            OutOfBlocksError: the pool is full; nothing has changed.
        """
        try:
            self._take_blocks(self._sequences)
            self._tables = [
                _as_array([row[group] for row in self._sequences], self.pool.block_size)
                for group in range(len(self.pool.groups))
            ]
        except BaseException:
            self.undo()
            raise
        self.allocated = True

    def _take_blocks(self, tables: Sequence[Sequence[BlockTable]]) -> None:
        pool = self.pool
        with pool.lock:  # until the copies are made, nobody else may write to or free what is copied
            for group, allocator in enumerate(pool.allocators):
                window = pool.freed_behind(group)
                needed_from = None
                if window is not None:
                    needed_from = [max(start - window + 1, 0) for start in self.starts]
                growth = allocator.grow([row[group] for row in tables], self.counts, needed_from)
                self._growths.append(growth)
                copy_shared(pool, group, growth)

    def undo(self) -> None:
        """Take the tokens back out of the block tables. Blocks that left a window stay free: no later step needs
        them."""
        with self.pool.lock:
            for allocator, growth in zip(self.pool.allocators, self._growths, strict=False):
                allocator.undo(growth)
        self._growths, self.allocated = [], False

    @property
    def last_tokens(self) -> np.ndarray:
        """`[sequences]`: where each sequence's last token stands in the packed input."""
        return np.cumsum(self.counts) - 1

    def plan(self, segment: Segment, group: int, device: torch.device) -> GroupPlan:
        """What kernels need to know of a segment."""
        plan = segment.plans.get((group, device))
        if plan is None:
            self._make_plans(group, device)
            plan = segment.plans[group, device]
        return plan

    def _make_plans(self, group: int, device: torch.device) -> None:
        """All segments' plans for a group, in one copy where the device is another."""
        arrays, first = [], 0
        for segment in self.segments:
            rows = slice(first, first + segment.rows)
            positions = self.positions[segment.start : segment.stop].reshape(segment.rows, segment.q_len)
            arrays += [self._tables[group][rows], self._context_lens[rows], positions]
            first = rows.stop
        tensors = [torch.from_numpy(array) for array in arrays]
        if device.type != "cpu":
            tensors = send_together(tensors, device)
        first = 0
        for index, segment in enumerate(self.segments):
            longest = int(self._context_lens[first : first + segment.rows].max())
            segment.plans[group, device] = GroupPlan(*tensors[3 * index : 3 * index + 3], max_context=longest)
            first += segment.rows


def _as_array(tables: Sequence[BlockTable], block_size: int) -> np.ndarray:
    """`[sequences, max_blocks]` int32."""
    width = max(table.first + len(table.blocks) for table in tables)
    array = np.zeros((len(tables), width), np.int32)
    for row, table in zip(array, tables, strict=True):
        row[table.first : table.first + len(table.blocks)] = table.blocks
    return array


class PackedHandle:
    """What `PackedCache.update` leaves on the key and the value it returns, for the attention function.

    Attributes:
        cache, layer: whose they are.
        key, value: the new tokens, `[1, kv_heads, tokens, dim]`.
    """

    __slots__ = ("cache", "key", "layer", "value")

    def __init__(self, cache: PackedCache, layer: PackedLayer, key: torch.Tensor, value: torch.Tensor) -> None:
        self.cache, self.layer, self.key, self.value = cache, layer, key, value


class PackedLength(int):
    """The query offset of a packed step: transformers hands it on to the mask function, which so learns for which layer
    a mask is made."""

    cache: weakref.ref[PackedCache]
    layer: int


class PackedLayer(CacheLayerMixin):
    """One layer's blocks."""

    is_compileable = False
    is_croppable = False

    def __init__(self, index: int, group: int, kind: str, window: int | None) -> None:
        # The base class would set `keys` and `values`.
        self.index, self.group, self.kind, self.window = index, group, kind, window
        self.is_sliding = kind != "full_attention"
        self.storage: LayerStorage | None = None
        self.backend: select.Backend | None = None

    @property
    def is_initialized(self) -> bool:
        return self.storage is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise NotImplementedError

    def get_max_length(self) -> int:
        return self.window if self.window is not None else -1

    def _not_here(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("a packed step's cache can only be updated")

    update = get_mask_sizes = get_seq_length = reset = crop = reorder_cache = _not_here

    def _not_told(self) -> torch.Tensor:
        raise NotImplementedError("it reads keys and values out of the cache, which packed steps do not gather")

    keys = values = property(_not_told)

    def __deepcopy__(self, memo: dict) -> PackedLayer:
        raise NotImplementedError("it adds copies of layers to the cache that it is given")


running: ContextVar[PackedCache | None] = ContextVar("running", default=None)
"""The cache of the packed step that this thread feeds to a model."""


class PackedCache(Cache):
    """A pool as the model sees it in packed steps.

    Args:
        pool: bound to the model's groups of layers.
        num_layers: of the model.

    Attributes:
        step: the step that runs. Its blocks are found now if the pool had no size before.
        unread: the layer that was updated last, until the attention function gets what it handed out.
        updated: the layers that this step has updated.
    """

    def __init__(self, pool: BlockPool, num_layers: int) -> None:
        self.pool = pool
        groups = {index: number for number, group in enumerate(pool.groups) for index in group.layers}
        super().__init__(
            layers=[
                PackedLayer(i, groups[i], pool.groups[groups[i]].kind, pool.groups[groups[i]].window)
                if i in groups
                else PackedLayer(i, -1, "dummy", None)
                for i in range(num_layers)
            ]
        )
        self.step: PackedStep | None = None
        self.unread: int | None = None
        self.updated: set[int] = set()
        self.plain_groups: set[int] = set()

    def begin(self, step: PackedStep) -> None:
        """A forward pass begins."""
        self.step, self.unread = step, None
        self.updated.clear()
        self.plain_groups.clear()
        running.set(self)

    def end(self) -> None:
        """A forward pass has ended, or failed."""
        self.step = self.unread = None
        running.set(None)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens of one layer.

        Args:
            key_states, value_states: `[1, kv_heads, tokens, dim]`

        Returns:
            The same values, for the attention function to find the handle on.

        Raises:
            ValueError: other heads, widths, dtype or device than the pool holds.
            NotImplementedError: the layer before changed what it was given before it attended, or this one has been
                updated in this step.
        """
        layer, step = self.layers[layer_idx], self.step
        self.check_read()
        if layer_idx in self.updated:
            raise NotImplementedError(f"layer {layer_idx} stores keys and values more than once in a forward pass")
        self.updated.add(layer_idx)
        key, value = key_states.detach(), value_states.detach()
        layer.storage = self.pool.storage(layer.index, key, value)
        if not step.allocated:
            step.allocate()
        if key.shape[0] != 1 or key.shape[2] != step.num_tokens:
            raise NotImplementedError(f"layer {layer_idx} changed the shape of its input to {tuple(key.shape)}")
        if layer.backend is None:
            backend = select.backend_for(layer.storage.device, key.dtype, layer.storage)
            # What no kernel of a GPU serves goes the dense way elsewhere; the reference is that for one row at a time.
            layer.backend = select.reference() if isinstance(backend, select.StoreOnly) else backend
        for segment in step.segments:
            plan = step.plan(segment, layer.group, key.device)
            layer.backend.write(layer.storage, segment.cut(key), segment.cut(value), plan)
        self.unread = layer_idx
        key_states, value_states = key_states.view_as(key_states), value_states.view_as(value_states)
        handle = PackedHandle(self, layer, key_states, value_states)
        setattr(key_states, HANDLE, handle)
        setattr(value_states, HANDLE, handle)
        return key_states, value_states

    def check_read(self) -> None:
        """Raises NotImplementedError if what the last update gave has not reached the attention function."""
        if self.unread is not None:
            layer, self.unread = self.unread, None
            raise NotImplementedError(
                f"layer {layer} changes its keys or values after updating the cache (as multi-head latent attention "
                "does), or does not attend through transformers' attention interface"
            )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: the packed row begins anew with every step. Models are given positions."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        length = PackedLength(0)
        length.cache, length.layer = weakref.ref(self), layer_idx
        return length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    @property
    def is_compileable(self) -> bool:
        return False
