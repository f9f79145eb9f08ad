"""What a compiled decode step sees of a cache.

torch.compile guards on all that a graph read while it was traced. So a graph is not given a `PagedCache`, whose state
moves with every step, but a `StepCache`: for a batch size the same objects, and tensors at the same addresses, in
every step and for every cache on the pool. What differs from step to step is written into these tensors on the host,
before the graph runs. Sizes that may change (blocks in the pool, width of the block table, padded length) are marked
as dynamic, so that they make no new graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_paged.kernels.ops import bind, blocks_of
from hf_paged.layer import HANDLE, PagedLayer
from hf_paged.plan import GroupPlan, StepPlan, send_together

if TYPE_CHECKING:
    from hf_paged.cache import PagedCache

MAX_QUERIES = 16
"""New tokens per row up to which a step may be compiled; more is a prompt, which gains nothing."""
MIN_WIDTH = 16
"""Columns of the smallest block table."""


class NoKernelError(NotImplementedError):
    """A model asks for something in a compiled step that no kernel does; the step can run without a graph."""


class StepHandle:
    """What `StepCache.update` leaves on the key and the value it returns, for the attention function.

    Attributes:
        cache, layer: whose they are.
        key, value: the new tokens, `[rows, kv_heads, q_len, dim]`.
    """

    __slots__ = ("cache", "key", "layer", "value")

    def __init__(self, cache: StepCache, layer: StepLayer, key: torch.Tensor, value: torch.Tensor) -> None:
        self.cache, self.layer, self.key, self.value = cache, layer, key, value


class StepGroup:
    """The tensors of a group of layers on one device.

    Attributes:
        block_table: `[rows, width]` int32; it is replaced by a wider one when a row outgrows it.
        positions: `[rows, q_len]` int32, as in `GroupPlan`.
        length: padded length before the step, `[]` int32.
    """

    def __init__(self, group: int, device: torch.device, num_rows: int, q_len: int, block_size: int) -> None:
        self.group, self.device, self.block_size = group, device, block_size
        self.shape = (num_rows, q_len)
        # Each part begins at a multiple of 16 bytes, as kernels like it.
        self._starts = (0, _aligned(num_rows * q_len), _aligned(num_rows * q_len) + _aligned(num_rows))
        with torch.inference_mode(False):
            self._numbers = torch.zeros(self._starts[2] + 4, dtype=torch.int32, device=device)
            self.positions = self._numbers[: num_rows * q_len].view(num_rows, q_len)
            self.context_lens = self._numbers[self._starts[1] :][:num_rows]
            self.length = self._numbers[self._starts[2]]
        self._staged = self._numbers.numpy() if device.type == "cpu" else np.zeros(len(self._numbers), np.int32)
        for tensor in (self.positions, self.length):
            torch._dynamo.mark_static_address(tensor, guard=False)
        if q_len > 1:
            torch._dynamo.mark_dynamic(self.positions, 1)
        self._table_stamp = -1
        self._widen(MIN_WIDTH)

    def _widen(self, width: int) -> None:
        with torch.inference_mode(False):
            self.block_table = torch.zeros((self.shape[0], width), dtype=torch.int32, device=self.device)
        torch._dynamo.mark_static_address(self.block_table, guard=False)
        torch._dynamo.mark_dynamic(self.block_table, 1)
        # A CUDA graph keeps the launches it was captured with, so there the plan is for all that the table can name.
        self.plan = GroupPlan(
            self.block_table, self.context_lens, self.positions, max_context=width * self.block_size, is_static=True
        )

    @property
    def capacity(self) -> int:
        """Tokens that a row of the block table can name. It stays what it is for many steps: a CUDA graph is recorded
        anew for every number that a graph reads."""
        return self.block_table.shape[1] * self.block_size

    def fill(self, step: StepPlan) -> bool:
        """Write a step's plan into the tensors.

        Returns:
            Whether the block table moved.
        """
        longest = int(step.context_lens.max())
        width, moved = -(-longest // self.block_size), False
        if width > self.block_table.shape[1]:
            self._widen(1 << (width - 1).bit_length())
            self._table_stamp, moved = -1, True
        source, stamp = step.block_tables[self.group], step.table_stamps[self.group]
        if stamp != self._table_stamp:
            self._table_stamp = stamp
            self._send(self.block_table[:, :width], source[:, :width])
        numbers = self._staged
        for start, part in zip(self._starts, (step.positions.ravel(), step.context_lens, step.start), strict=True):
            numbers[start : start + np.size(part)] = part
        self._send(self._numbers, numbers)
        if self.device.type == "cpu":
            self.plan.max_context = longest
        return moved

    def _send(self, tensor: torch.Tensor, array: np.ndarray) -> None:
        if self.device.type != "cpu":  # by way of pinned memory that nobody writes to before the copy is done
            tensor.copy_(send_together([torch.from_numpy(np.ascontiguousarray(array))], self.device)[0])
        elif array is not self._staged:
            tensor.numpy()[:] = array


class StepLayer(CacheLayerMixin):
    """The blocks of one layer, and the plan of its group."""

    is_compileable = True
    is_croppable = True

    def __init__(self, layer: PagedLayer, group: StepGroup) -> None:
        # The base class would set `keys` and `values`.
        self.is_sliding, self.window, self.group = layer.is_sliding, layer.window, group
        self.is_initialized = True
        self._source = layer.storage, layer.backend
        # Of one block, so that the size of the pool is no number of the graph. The operator knows the whole by the
        # address, and finds nothing where a copy was made.
        self.blocks, self.value_blocks = (t if t is None else t[:1] for t in blocks_of(layer.storage))
        self.kv_heads = layer.storage.key_blocks.shape[1]
        self.key_dim, self.value_dim = layer.storage.key_blocks.shape[-1], layer.storage.value_blocks.shape[-1]
        for tensor in (self.blocks, self.value_blocks):
            if tensor is not None:
                torch._dynamo.mark_static_address(tensor, guard=False)
        self.bind()

    def bind(self) -> None:
        """Tell the operator, again whenever the group's plan is another object."""
        self._bound = bind(*self._source, self.group.plan)

    def get_max_length(self) -> int:
        return self.window if self.window is not None else -1

    def _not_here(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("within a compiled decode step a cache can only be updated")

    lazy_initialization = update = get_mask_sizes = get_seq_length = reset = crop = reorder_cache = _not_here


class StepCache(Cache):
    """A cache as one decode step of a compiled model sees it. `prepare` fills it for a step of a `PagedCache`.

    Args:
        layers: the layers of that cache.
        num_rows, q_len: shape of the steps.
        block_size: of the pool.
    """

    def __init__(self, layers: list[Any], num_rows: int, q_len: int, block_size: int) -> None:
        self.shape = (num_rows, q_len)
        self.groups: dict[tuple[int, torch.device], StepGroup] = {}
        for layer in layers:
            if isinstance(layer, PagedLayer):
                place = (layer.group, layer.device)
                if place not in self.groups:
                    self.groups[place] = StepGroup(*place, num_rows, q_len, block_size)
        super().__init__(
            layers=[
                StepLayer(layer, self.groups[layer.group, layer.device])
                if isinstance(layer, PagedLayer)
                else layer  # of a kind that holds nothing
                for layer in layers
            ]
        )
        first = next(layer for layer in self.layers if isinstance(layer, StepLayer))
        self.first = first.group
        with torch.inference_mode(False):
            # NaN takes no memory, and whoever computes with it instead of passing it on sees so.
            self._nan = torch.full((), float("nan"), dtype=first.blocks.dtype, device=first.blocks.device)
        self._make_mask()
        self._user: Callable[[], PagedCache | None] = _nobody
        self.by_hooks = False
        """The hooks around the forward pass end the step."""
        self.unread: int | None = None
        """The layer that was updated last, until the attention function gets what it handed out."""

    def is_used_by_another(self, cache: PagedCache) -> bool:
        """Whether a forward pass of another cache is using the tensors: a pass within a pass."""
        user = self._user()
        return user is not None and user is not cache and user.in_pass

    def take_user(self) -> PagedCache:
        """The cache whose step is in the tensors."""
        user, self._user = self._user(), _nobody
        return user

    def prepare(self, cache: PagedCache, step: StepPlan) -> None:
        """Write what a step needs into the tensors that the graph reads."""
        self._user = weakref.ref(cache)
        self.unread = None
        moved = [group for group in self.groups.values() if group.fill(step)]
        if moved:
            for layer in self.layers:
                if isinstance(layer, StepLayer) and layer.group in moved:
                    layer.bind()
            self._make_mask()

    def _make_mask(self) -> None:
        """Make `mask`, `[rows, 1, q_len, capacity]`: it stands for the attention mask, which is in the plan."""
        with torch.inference_mode(False):
            self.mask = self._nan.expand(self.shape[0], 1, self.shape[1], self.first.capacity)
        torch._dynamo.mark_dynamic(self.mask, 3)
        if self.shape[1] > 1:
            torch._dynamo.mark_dynamic(self.mask, 2)

    # What is traced ----------------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand the new tokens on to the attention function, which stores them.

        Returns:
            Tensors of the shape of all keys and values that the block table has room for, as a StaticCache gives; NaN
            that takes no memory.
        """
        layer = self.layers[layer_idx]
        rows, kv_heads, _, key_dim = key_states.shape
        value_dim = value_states.shape[-1]
        blocks = layer.blocks
        if (
            (kv_heads, key_dim, value_dim) != (layer.kv_heads, layer.key_dim, layer.value_dim)
            or key_states.dtype != blocks.dtype
            or value_states.shape[1] != kv_heads
        ):
            raise NoKernelError("the layer stores other keys and values than before")
        if self.unread is not None:
            raise NoKernelError("a layer changed its keys after updating the cache")
        self.unread = layer_idx
        nan = key_states.new_full((), float("nan"))
        capacity = layer.group.capacity
        keys = nan.expand(rows, kv_heads, capacity, key_dim)
        values = value_states.new_full((), float("nan")).expand(rows, kv_heads, capacity, value_dim)
        handle = StepHandle(self, layer, key_states, value_states)
        setattr(keys, HANDLE, handle)
        setattr(values, HANDLE, handle)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Padded length, as a tensor, so that it is no constant of the graph."""
        return self.first.length

    def get_query_offset(self, layer_idx: int = 0) -> torch.Tensor:
        return self.first.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.first.capacity, 0


def _nobody() -> None:
    return None


def _aligned(count: int) -> int:
    return -(-count // 4) * 4
