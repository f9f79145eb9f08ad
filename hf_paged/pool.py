"""The block pool: the physical blocks of all layers, and the books of who holds them."""

from __future__ import annotations

import gc
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch
from accelerate.utils import convert_file_size_to_int

from hf_paged.allocator import BlockAllocator, BlockTable, Growth, check_block_size
from hf_paged.errors import OutOfBlocksError
from hf_paged.parking import Parking
from hf_paged.prefix import PrefixIndex
from hf_paged.storage import LayerStorage

if TYPE_CHECKING:
    from hf_paged.recording import Recording

logger = logging.getLogger("hf_paged")

DEFAULT_FRACTION = 0.5
"""Share of the memory that is free at first use which a pool may take when it is given no budget."""


MAX_STEP_CACHES = 64
"""Kinds of compiled steps that a pool keeps tensors for."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers that see the same tokens through the same kind of attention, and so share block tables.

    Attributes:
        kind: `full_attention`, `sliding_attention` or `chunked_attention`, as in transformers' `layer_types`.
        window: tokens that a query sees, itself included, or the chunk size; None for full attention.
        layers: indices of the layers in the model.
    """

    kind: str
    window: int | None
    layers: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.kind if self.window is None else f"{self.kind}({self.window})"


class _PoolLock:
    """A lock that a thread may take again while it has it, and which knows whether anybody has it."""

    def __init__(self, on_free: Callable[[], object]) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._on_free = on_free

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:  # something may have been given back after the last holder had looked
            try:
                self._on_free()
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *error: object) -> None:
        try:
            if self._depth == 1:
                self._on_free()
        finally:
            self._depth -= 1
            self._lock.release()

    def take_if_free(self) -> bool:
        """Take the lock unless a thread has it, this one included. To be given up as at the end of `with`."""
        if not self._lock.acquire(blocking=False):
            return False
        if self._depth:
            self._lock.release()
            return False
        self._depth = 1
        return True


class BlockPool:
    """Blocks for every layer of a model, shared by the caches that are made on it.

    Each group of layers has its own block ids; within a group, block `b` is the same tokens in every layer. Tensors are
    made when a layer first stores something, since only then device, dtype and shape are known; the number of blocks
    is settled at the first of them.

    Args:
        block_size: tokens per block, a power of two from 1 to 256.
        num_blocks: blocks per layer. Excludes `max_memory`.
        max_memory: budget for all layers together: bytes, a string such as `"4GiB"`, or a fraction (a float up to 1.0)
            of the memory that is free at first use. It is divided as if all layers were as large as the first that
            stores something. Without either, half of what is free then: on a CPU the system
            commits that memory only as blocks are written; on a GPU it is taken at once.
        prefix_cache: keep prompts after their caches are gone, so that generate() with an enabled model computes only
            what is new. What is kept counts as free, and the least recently used gives way.

    Raises:
        ValueError: a size out of range, or both budgets given.
    """

    def __init__(
        self,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_memory: int | float | str | None = None,
        prefix_cache: bool = False,
    ) -> None:
        check_block_size(block_size)
        if num_blocks is not None and max_memory is not None:
            raise ValueError("give num_blocks or max_memory, not both")
        self.block_size = block_size
        self.groups: tuple[LayerGroup, ...] = ()
        self.allocators: list[BlockAllocator] = []
        self.storages: dict[int, LayerStorage] = {}
        self.hands_over: dict[int, bool] = {}
        """Whether the model passes what a layer's update returns unchanged to the attention function, once seen."""
        self.recordings: tuple[Recording, ...] = ()
        """Those that are told of every step; see `hf_paged.record`."""
        self._step_caches: OrderedDict[tuple, Any] = OrderedDict()  # least recently used first
        self._returned: deque[list[list[BlockTable]]] = deque()
        # The last to hold the lock must find the pool alive, but the pool must not hold itself alive.
        drain = _Drain(self.allocators, self._returned)
        self.lock = _PoolLock(drain)
        self.parking = Parking(drain)
        if prefix_cache:
            self.parking.prefixes = PrefixIndex(self.allocators, block_size)
        self._num_blocks = num_blocks
        self._budget = parse_memory(max_memory)
        if num_blocks is not None:
            BlockAllocator(num_blocks, block_size)  # says what is wrong with it now, not at first use
            if num_blocks > _most_blocks(block_size):
                raise ValueError(
                    f"num_blocks must be at most {_most_blocks(block_size):,} for blocks of {block_size} tokens, not "
                    f"{num_blocks:,}"
                )

    def __repr__(self) -> str:
        num_blocks = self.allocators[0].num_blocks if self.is_sized else self._num_blocks
        size = "as many as fit" if num_blocks is None else f"{num_blocks:,}"
        used = ", ".join(f"{allocator.num_used:,}" for allocator in self.allocators) or "0"
        kept = "" if self.prefixes is None else f", kept={len(self.prefixes):,}"
        return f"BlockPool(blocks={used} of {size}{kept}, block_size={self.block_size})"

    def _repr_html_(self) -> str:
        from hf_paged.pictures.html import html_of_pool

        return html_of_pool(self)

    @classmethod
    def given_or_new(
        cls,
        pool: BlockPool | None,
        *,
        block_size: int | None,
        num_blocks: int | None,
        max_memory: int | float | str | None,
        prefix_cache: bool | None,
    ) -> BlockPool:
        """`pool`, or a new one with these options.

        Raises:
            ValueError: both were given, or an option is out of range.
        """
        if pool is None:
            return cls(
                block_size=16 if block_size is None else block_size,
                num_blocks=num_blocks,
                max_memory=max_memory,
                prefix_cache=bool(prefix_cache),
            )
        if any(option is not None for option in (block_size, num_blocks, max_memory, prefix_cache)):
            raise ValueError(
                "block_size, num_blocks, max_memory and prefix_cache belong to the pool; give them to BlockPool"
            )
        return pool

    @property
    def prefixes(self) -> PrefixIndex | None:
        """The prompts that are kept, if they are."""
        return self.parking.prefixes

    def forget_prompts(self) -> None:
        """Give up all prompts that are kept."""
        if self.prefixes is not None:
            with self.lock:
                self.prefixes.clear()

    def freed_behind(self, group: int) -> int | None:
        """The window of a group of layers whose blocks are freed once they have left it, else None.

        A pool that keeps prompts keeps all their blocks: who goes on from one needs the window before any position.
        """
        layers = self.groups[group]
        return layers.window if layers.kind == "sliding_attention" and self.prefixes is None else None

    def step_cache(self, key: tuple, make: Callable[[], Any]) -> Any:
        """What compiled decode steps of a kind are given instead of a cache; see `hf_paged.step_cache`.

        Args:
            key: the kind, the thread first.
        """
        with self.lock:
            found = self._step_caches.get(key)
            if found is None:
                alive = {thread.ident for thread in threading.enumerate()}
                for other in [other for other in self._step_caches if other[0] not in alive]:
                    del self._step_caches[other]
                while len(self._step_caches) >= MAX_STEP_CACHES:
                    self._step_caches.popitem(last=False)
                found = self._step_caches[key] = make()
            self._step_caches.move_to_end(key)
            return found

    @property
    def is_sized(self) -> bool:
        """Whether the number of blocks is known."""
        return bool(self.allocators)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the tensors made so far."""
        return sum(s.bytes_per_block * s.key_blocks.shape[0] for s in self.storages.values())

    def bytes_per_block(self, group: int) -> int:
        """Bytes that one block of `group` takes over all its layers."""
        layers = self.groups[group].layers
        return sum(self.storages[layer].bytes_per_block for layer in layers if layer in self.storages)

    def give_back(self, tables: list[list[BlockTable]]) -> None:
        """Release block tables, one list for each group of layers.

        A finalizer may call this while the lock is held, by its own thread too, since the garbage collector runs when
        it likes; then whoever holds the lock releases them at the end.
        """
        self._returned.append(tables)
        if self.lock.take_if_free():
            self.lock.__exit__()

    def grow(
        self, group: int, tables: Sequence[BlockTable], counts: Sequence[int], needed_from: Sequence[int] | None = None
    ) -> Growth:
        """`BlockAllocator.grow`, which fails only once no block is left to caches that nobody can reach any more. The
        caller has the lock."""
        allocator = self.allocators[group]
        try:
            return allocator.grow(tables, counts, needed_from)
        except OutOfBlocksError:
            own = {block for table in tables for block in table.blocks}
            if allocator.num_used <= len(own) or not self.collect_garbage():
                raise
        return allocator.grow(tables, counts, needed_from)

    def collect_garbage(self) -> bool:
        """Have dead caches give back their blocks: those in reference cycles (an exception's traceback holds the
        variables of all its frames) wait for Python's garbage collector, which does not know that blocks are scarce.

        Returns:
            Whether there were any.
        """
        with self.lock:
            gc.collect()
            return self.parking.drain()

    def bind(self, groups: Sequence[LayerGroup]) -> None:
        """Adopt the layout of a model, or check that it is the one adopted before.

        Raises:
            ValueError: caches of differently built models cannot share a pool.
        """
        with self.lock:
            if not self.groups:
                self.groups = tuple(groups)
                if self._num_blocks is not None:
                    self._settle_size(self._num_blocks)
            elif self.groups != tuple(groups):
                raise ValueError(
                    f"this pool was made for a model with {_describe(self.groups)}, and cannot hold a cache for one "
                    f"with {_describe(groups)}; make a pool of its own for each model"
                )

    def storage(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> LayerStorage:
        """The blocks of `layer`, made at the first call to fit `key` and `value` (`[rows, kv_heads, q_len, dim]`).

        Raises:
            ValueError: the tensors have other heads, widths, dtypes or another device than the layer's blocks, or the
                budget holds no block.
            MemoryError: the budget cannot be reserved.
        """
        storage = self.storages.get(layer)
        if storage is None:
            with self.lock:
                storage = self.storages.get(layer) or self._make_storage(layer, key, value)
        have = (storage.key_blocks, storage.value_blocks)
        if any(
            h.shape[1] != t.shape[1] or h.shape[3] != t.shape[3] or h.dtype != t.dtype or h.device != t.device
            for h, t in zip(have, (key, value), strict=True)
        ):
            raise ValueError(
                f"the blocks of layer {layer} were made for {_describe_kv(*have)}, but the layer was given "
                f"{_describe_kv(key, value)}; a pool serves one model in one dtype: make a new "
                "PagedCache(model.config) with a pool of its own for this one"
            )
        return storage

    def _make_storage(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> LayerStorage:
        per_block = (
            self.block_size * key.shape[1] * (key.shape[3] * key.element_size() + value.shape[3] * value.element_size())
        )
        num_layers = sum(len(group.layers) for group in self.groups)
        if not self.is_sized:
            free = free_memory(key.device)
            budget = self._budget if isinstance(self._budget, int) else int(free * (self._budget or DEFAULT_FRACTION))
            if budget < per_block * num_layers:
                raise ValueError(
                    f"max_memory of {budget:,} bytes holds no block: one of {self.block_size} tokens takes "
                    f"{per_block * num_layers:,} bytes over {num_layers} layers"
                )
            self._settle_size(budget // (per_block * num_layers))
        num_blocks = self.allocators[0].num_blocks
        try:
            storage = LayerStorage(
                num_blocks,
                self.block_size,
                key.shape[1],
                key.shape[3],
                value.shape[3],
                key.dtype,
                value.dtype,
                key.device,
            )
        except (RuntimeError, MemoryError) as error:
            raise MemoryError(
                f"cannot reserve {num_blocks:,} blocks ({num_blocks * per_block:,} bytes) for layer {layer} on "
                f"{key.device}: {error}. Give PagedCache a smaller num_blocks or max_memory"
            ) from error
        if not self.storages:
            logger.info(
                "block pool on %s: %s blocks of %d tokens (%s tokens), %s bytes reserved over %d layers%s",
                key.device,
                f"{num_blocks:,}",
                self.block_size,
                f"{num_blocks * self.block_size:,}",
                f"{num_blocks * per_block * num_layers:,}",
                num_layers,
                ", committed as they are written" if key.device.type == "cpu" else "",
            )
        self.storages[layer] = storage
        return storage

    def _settle_size(self, num_blocks: int) -> None:
        num_blocks = min(num_blocks, _most_blocks(self.block_size))
        self.allocators.extend(BlockAllocator(num_blocks, self.block_size) for _ in self.groups)
        for allocator in self.allocators:
            allocator.reclaim = self.parking.reclaim


def _most_blocks(block_size: int) -> int:
    """Of one pool: the kernels count slots in 32 bits."""
    return (2**31 - 1) // block_size


class _Drain:
    """Releases the tables that were given back."""

    def __init__(self, allocators: list[BlockAllocator], returned: deque[list[list[BlockTable]]]) -> None:
        self._allocators, self._returned = allocators, returned

    def __call__(self) -> bool:
        """Whether there were any."""
        found = bool(self._returned)
        while self._returned:
            for allocator, tables in zip(self._allocators, self._returned.popleft(), strict=False):
                for table in tables:
                    allocator.release(table)
        return found


def free_memory(device: torch.device) -> int:
    """Bytes that are free on `device` now, including what torch has cached for tensors to come; for a CPU, what the
    system calls available."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    if device.type == "xpu":
        cached = torch.xpu.memory_reserved(device) - torch.xpu.memory_allocated(device)
        return torch.xpu.mem_get_info(device)[0] + cached
    return psutil.virtual_memory().available


def parse_memory(value: int | float | str | None) -> int | float | None:
    """`max_memory` as it is given, made bytes, or a fraction (a float), or None for none.

    Raises:
        ValueError: it is neither, and the message says what would be.
    """
    if value is None:
        return None
    if isinstance(value, bool):
        raise ValueError(f"max_memory must be bytes, a size such as '4GiB' or a fraction, not {value!r}")
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise ValueError(f"max_memory as a fraction must be over 0 and at most 1.0, not {value!r}")
        return value
    try:
        if not isinstance(value, int | str):
            raise TypeError(type(value).__name__)
        size = convert_file_size_to_int(value)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"max_memory must be bytes, a size such as '4GiB' or '500MB', or a fraction, not {value!r}"
        ) from error
    if size < 1:
        raise ValueError(f"max_memory must be positive, not {value!r}")
    return size


def _describe(groups: Sequence[LayerGroup]) -> str:
    return " and ".join(f"{len(group.layers)} layers of {group.name}" for group in groups) or "no attention layers"


def _describe_kv(key: torch.Tensor, value: torch.Tensor) -> str:
    return (
        f"{key.shape[1]} KV heads of {key.shape[3]}/{value.shape[3]} in "
        f"{str(key.dtype).removeprefix('torch.')}/{str(value.dtype).removeprefix('torch.')} on {key.device}"
    )
