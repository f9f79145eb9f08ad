"""Paged attention on GPUs, by Triton: the backend for CUDA and ROCm devices.

The kernels are in `triton_decode`, `triton_prefill` and `triton_store`, with what they share in `triton_common`; how
they are cut for a device is in `triton_config`; here is what is done once a call. The shapes are those of
`reference`. Under Triton's interpreter (`TRITON_INTERPRET=1`) the same code runs on CPU tensors, slowly, for tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from hf_paged.plan import GroupPlan, send_together
from hf_paged.storage import LayerStorage

from .triton_config import (
    BLOCK_SIZES,
    COMBINE_STEP,
    MAX_DECODE_QUERIES,
    Config,
    Target,
    combine_warps,
    decode_config,
    next_power_of_2,
    num_splits,
    parts,
    prefill_config,
)
from .triton_decode import combine_kernel, decode_kernel
from .triton_launch import Launcher
from .triton_prefill import prefill_kernel
from .triton_store import copy_kernel, write_kernel

name = "triton"

LOG2_E = 1.4426950408889634
LARGEST_INT32 = 2**31 - 1
IS_HIP = torch.version.hip is not None
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CHUNK_ENVIRONMENT_VARIABLE = "HF_PAGED_DECODE_CHUNK"

_Use = tuple[bool, bool, torch.dtype | None, torch.dtype | None]


def _checked_chunk(tokens: int, where: str) -> int:
    if tokens < 128 or tokens & (tokens - 1):
        raise ValueError(f"{where}: a chunk is a power of two of 128 tokens or more, not {tokens}")
    return tokens


def _chunk_of_environment() -> int:
    """Tokens of a split, or 0 for a number of splits that fills the GPU."""
    text = os.environ.get(CHUNK_ENVIRONMENT_VARIABLE, "").strip()
    if text.isdecimal():
        return _checked_chunk(int(text), CHUNK_ENVIRONMENT_VARIABLE)
    if text:
        raise ValueError(f"{CHUNK_ENVIRONMENT_VARIABLE}={text!r} is no number of tokens")
    return 0


_chunk = _chunk_of_environment()


def unsupported(query_dtype: torch.dtype, storage: LayerStorage) -> str | None:
    """Why this backend cannot serve these dtypes and shapes on this device, or None."""
    key, value = storage.key_blocks, storage.value_blocks
    if storage.native.__class__ is NativeStorage and query_dtype == key.dtype:
        return None  # it serves it already
    if key.device.type != "cuda" and not knobs.runtime.interpret:
        return f"the Triton kernels run on GPUs, the blocks are on {key.device}"
    target = target_of(key.device)
    if target.is_nvidia and int(target.name[3:]) < 80:
        return f"the Triton kernels need compute capability 8.0, {target.name} is less"
    if not query_dtype == key.dtype == value.dtype:
        return f"the Triton kernels need one dtype, got query {query_dtype}, key {key.dtype}, value {value.dtype}"
    if query_dtype not in DTYPES:
        return f"the Triton kernels serve float16, bfloat16 and float32, not {query_dtype}"
    if storage.block_size not in BLOCK_SIZES:
        return f"the Triton kernels serve blocks of {', '.join(map(str, BLOCK_SIZES))} tokens, not {storage.block_size}"
    for dim in (key.shape[-1], value.shape[-1]):
        if dim % 8 or not 16 <= dim <= 256:
            return f"the Triton kernels serve head dims that are multiples of 8 from 16 to 256, not {dim}"
    if key.stride(-1) != 1 or value.stride(-1) != 1:
        return "the Triton kernels need head dims whose elements lie side by side"
    return None


def serves_graphs(device: torch.device) -> bool:
    """Whether a step may be part of a graph that torch compiles, and of a CUDA graph."""
    return True


def graph_key() -> object:
    """What a CUDA graph that was captured now would go on with, besides its tensors."""
    return _chunk


@contextmanager
def fixed_chunks(tokens: int) -> Iterator[None]:
    """Cut the sequence every `tokens` tokens in decode, instead of into as many pieces as fill the GPU.

    A row's result then does not depend on the other rows of the batch, to the last bit, as it does not on a CPU. The
    environment variable `HF_PAGED_DECODE_CHUNK` sets the same for a whole process. It holds for all threads.

    Raises:
        ValueError: `tokens` is no power of two of 128 or more.
    """
    global _chunk
    before, _chunk = _chunk, _checked_chunk(tokens, "fixed_chunks")
    try:
        yield
    finally:
        _chunk = before


def write(storage: LayerStorage, key: Tensor, value: Tensor, plan: GroupPlan) -> None:
    """Store the new tokens of a step; see `reference.write`."""
    native = _native(storage)
    key, value = _detached(key), _detached(value)
    tokens = plan.positions.numel()
    if not tokens:
        return
    strides = (*key.stride()[:3], *value.stride()[:3])
    table = plan.block_table
    native.writer(
        (_kinds(strides), _addresses(key, value, table, plan.positions)),
        (tokens, native.write_programs, 1),
        *(key, value, storage.key_blocks, storage.value_blocks, table, plan.positions, plan.positions.shape[1]),
        *strides,
        table.stride(0),
    )


def decode(
    query: Tensor,
    storage: LayerStorage,
    plan: GroupPlan,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    config: Config | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attention of a few new tokens a row over the row's stored tokens; see `reference.decode`.

    Args:
        config, splits: instead of what the rules give.
    """
    native = _native(storage)
    query, sinks, slopes = _detached(query), _detached(sinks), _detached(alibi_slopes)
    rows, heads, q_len, _ = query.shape
    out = query.new_empty((rows, q_len, heads, native.value_dim))
    if not rows * q_len:
        return out
    chunk = _chunk  # read once: another thread may change it
    use = _use(softcap, window, sinks, slopes)
    decoder = native.kernels.get((heads, q_len, use, chunk, config))
    if decoder is None:
        decoder = _Decoder(native, heads, q_len, use, chunk, config)
        native.kernels[heads, q_len, use, chunk, config] = decoder
    tile, programs = decoder.config.tile, decoder.programs
    if splits is None:
        # A window is as long as it is, and what it and its queries reach over tile borders.
        longest = plan.max_context if window is None else min(plan.max_context, window + q_len + tile)
        splits = max(1, -(-longest // chunk)) if chunk else num_splits(native.target, rows, programs, longest, tile)
    partial = None
    if splits > 1:
        partial = _workspace(plan, rows * q_len * heads * splits * (native.value_dim + 4))
    table, strides = plan.block_table, query.stride()[:3]
    decoder.attend[splits > 1](
        (_kinds((*strides, window or 0)), _addresses(out, query, table, plan.positions, sinks, slopes, partial)),
        (programs, rows, splits),
        *(out, partial, query, storage.key_blocks, storage.value_blocks, table, plan.positions, sinks, slopes),
        *_factors(scale, softcap),
        window or 0,
        *strides,
        table.stride(0),
    )
    if partial is not None:
        decoder.combine(_addresses(out, partial), (rows * q_len * heads, 1, 1), out, partial, splits)
    return out


def prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    storage: LayerStorage,
    plan: GroupPlan,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """Causal attention of a step's new tokens over what their rows have stored; see `reference.prefill`."""
    rows, heads, q_len, _ = query.shape
    if q_len <= MAX_DECODE_QUERIES and config is None:
        options = {"softcap": softcap, "window": window, "sinks": sinks, "alibi_slopes": alibi_slopes}
        return decode(query, storage, plan, scale=scale, **options)
    native = _native(storage)
    query, sinks, slopes = _detached(query), _detached(sinks), _detached(alibi_slopes)
    out = query.new_empty((rows, q_len, heads, native.value_dim))
    if not rows * q_len:
        return out
    use = _use(softcap, window, sinks, slopes)
    launcher, m = native.prefill_kernel(heads, use, config)
    table, strides = plan.block_table, query.stride()[:3]
    launcher(
        (_kinds((*strides, window or 0)), _addresses(out, query, table, plan.positions, sinks, slopes)),
        (heads, -(-q_len // m), rows),
        *(out, query, storage.key_blocks, storage.value_blocks, table, plan.positions, sinks, slopes),
        *_factors(scale, softcap),
        *(window or 0, q_len),
        *strides,
        table.stride(0),
    )
    return out


@torch.no_grad()
def copy_blocks(storage: LayerStorage, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks; see `reference.copy_blocks`."""
    if not pairs:
        return
    native = _native(storage)
    on_device = _pairs_on(storage.device, tuple(pairs))
    together = (storage.kv,) if storage.kv is not None else (storage.key_blocks, storage.value_blocks)
    for blocks, (copier, programs) in zip(together, native.copiers(together), strict=True):
        copier(_addresses(on_device), (len(pairs), programs, 1), blocks, on_device)


@lru_cache(maxsize=8)  # the layers of a group copy the same blocks
def _pairs_on(device: torch.device, pairs: tuple[tuple[int, int], ...]) -> Tensor:
    return send_together([torch.tensor(pairs, dtype=torch.int32, device="cpu")], device)[0]


def _detached(tensor: Tensor | None) -> Tensor | None:
    """Without a gradient, and with its last dimension side by side."""
    if tensor is None:
        return None
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _kinds(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """What Triton tells apart of integers: multiples of 16, 1, others; and 64 bits."""
    return tuple([(0 if n % 16 == 0 else 1 if n == 1 else 2) + (n >> 31) * 4 for n in numbers])


def _addresses(*tensors: Tensor | None) -> int:
    """What Triton tells apart of tensors: addresses that are multiples of 16, and on AMD's GPUs memory of less than
    2 GiB, whose offsets fit 32 bits. 0 for the most of both."""
    bits = 0
    for place, tensor in enumerate(tensors):
        if tensor is None:
            continue
        if tensor.data_ptr() % 16:
            bits |= 1 << place
        if IS_HIP and tensor.untyped_storage().size() > LARGEST_INT32:
            bits |= 1 << (place + len(tensors))
    return bits


def _use(softcap: float | None, window: int | None, sinks: Tensor | None, slopes: Tensor | None) -> _Use:
    """Which options are used, and of which dtype they are: for each such use there is a compiled kernel."""
    sinks_dtype = None if sinks is None else sinks.dtype
    return softcap is not None, window is not None, sinks_dtype, None if slopes is None else slopes.dtype


def _factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """The kernels' `scale` and `softcap`: they compute in units of log 2."""
    if softcap is None:
        return scale * LOG2_E, 0.0
    return scale / softcap, softcap * LOG2_E


def _workspace(plan: GroupPlan, size: int) -> Tensor:
    """Float32 memory for the splits of a decode: the layers of a step run one after the other, and share it."""
    if plan.is_static:  # within a CUDA graph memory is the graph's, and must not be kept
        return torch.empty(size, dtype=torch.float32, device=plan.positions.device)
    if not isinstance(plan.native, Tensor) or plan.native.numel() < size:
        plan.native = torch.empty(size, dtype=torch.float32, device=plan.positions.device)
    return plan.native


@lru_cache
def target_of(device: torch.device) -> Target:
    """What the rules want to know of a device; the interpreter is taken for a small sm_90."""
    if device.type != "cuda":
        return Target("sm_90", multiprocessors=8)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Target(properties.gcnArchName.split(":")[0], properties.multi_processor_count)
    return Target(f"sm_{properties.major}{properties.minor}", properties.multi_processor_count)


class NativeStorage:
    """What the kernels want to know of a layer's blocks, and the kernels for them."""

    def __init__(self, key_blocks: Tensor, value_blocks: Tensor, target: Target) -> None:
        _, self.kv_heads, block_size, self.key_dim = key_blocks.shape
        self.value_dim = value_blocks.shape[-1]
        self.itemsize = key_blocks.element_size()
        self.target = target
        self.device = key_blocks.device
        self.shapes = {
            **dict(zip(("KEY_BLOCK", "KEY_HEAD", "KEY_SLOT"), key_blocks.stride()[:3], strict=True)),
            **dict(zip(("VALUE_BLOCK", "VALUE_HEAD", "VALUE_SLOT"), value_blocks.stride()[:3], strict=True)),
            **{"KEY_DIM": self.key_dim, "VALUE_DIM": self.value_dim},
            **{"BLOCK_SIZE": block_size, "KV_HEADS": self.kv_heads},
        }
        self.kernels: dict[Any, Any] = {}  # by use
        elements = self.kv_heads * max(self.key_dim, self.value_dim)
        width = min(4096, next_power_of_2(elements))
        self.writer = Launcher(write_kernel, {**self.shapes, "WIDTH": width}, self.device, num_warps=4)
        self.write_programs = -(-elements // width)

    def attention_constants(self, heads: int, use: _Use, config: Config) -> dict[str, Any]:
        softcap, window, sinks_dtype, slopes_dtype = use
        key_1, key_2 = parts(self.key_dim, self.itemsize, self.target)
        value_1, value_2 = parts(self.value_dim, self.itemsize, self.target)
        return {
            **self.shapes,
            **{"KEY_1": key_1, "KEY_2": key_2, "VALUE_1": value_1, "VALUE_2": value_2},
            **{"GROUP": heads // self.kv_heads, "M": config.m, "TILE": config.tile},
            **{"SOFTCAP": softcap, "WINDOW": window},
            **{"SINKS": sinks_dtype is not None, "ALIBI": slopes_dtype is not None},
            # Without it the products of float32 are done in TF32, with 10 bits; three of them keep 20 and more.
            "PRECISION": "tf32x3" if self.itemsize == 4 and self.target.is_nvidia else "ieee",
        }

    def prefill_kernel(self, heads: int, use: _Use, config: Config | None) -> tuple[Launcher, int]:
        """The kernel, and how many queries one of its programs takes."""
        kernel = self.kernels.get((heads, use, config))
        if kernel is None:
            cut = config or prefill_config(self.target, self.key_dim, self.value_dim, self.itemsize)
            constants = self.attention_constants(heads, use, cut)
            options = {"num_warps": cut.warps, "num_stages": cut.stages}
            kernel = Launcher(prefill_kernel, constants, self.device, **options), cut.m
            self.kernels[heads, use, config] = kernel
        return kernel

    def copiers(self, together: tuple[Tensor, ...]) -> list[tuple[Launcher, int]]:
        """For each tensor of blocks a kernel that copies some, and how many programs a block takes."""
        if "copy" not in self.kernels:
            self.kernels["copy"] = []
            for blocks in together:
                size = blocks[0].numel()
                width = min(4096, next_power_of_2(size))
                constants = {"STRIDE": blocks.stride(0), "SIZE": size, "WIDTH": width}
                copier = Launcher(copy_kernel, constants, self.device, num_warps=4)
                self.kernels["copy"].append((copier, -(-size // width)))
        return self.kernels["copy"]


class _Decoder:
    """The kernels of one use of decode."""

    __slots__ = ("attend", "combine", "config", "programs")

    def __init__(
        self, native: NativeStorage, heads: int, q_len: int, use: _Use, chunk: int, config: Config | None
    ) -> None:
        queries = heads // native.kv_heads * q_len
        dims = native.key_dim, native.value_dim
        self.config = config = config or decode_config(native.target, *dims, native.itemsize, queries)
        self.programs = native.kv_heads * -(-queries // config.m)
        constants = {**native.attention_constants(heads, use, config), "Q_LEN": q_len, "CHUNK": chunk}
        options = {"num_warps": config.warps, "num_stages": config.stages}
        self.attend = tuple(
            Launcher(decode_kernel, {**constants, "SPLIT": split}, native.device, **options) for split in (False, True)
        )
        width = next_power_of_2(native.value_dim)
        constants = {"VALUE_DIM": native.value_dim, "WIDTH": width, "STEP": COMBINE_STEP}
        warps = combine_warps(native.value_dim)
        self.combine = Launcher(combine_kernel, constants, native.device, num_warps=warps)


def _native(storage: LayerStorage) -> NativeStorage:
    native = storage.native
    if native.__class__ is not NativeStorage:
        target = target_of(storage.device)
        native = storage.native = NativeStorage(storage.key_blocks, storage.value_blocks, target)
    return native
