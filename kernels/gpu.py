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

from hf_paged.plan import GroupPlan
from hf_paged.storage import LayerStorage

from .triton_config import (
    BLOCK_SIZES,
    MAX_DECODE_QUERIES,
    Config,
    Target,
    decode_config,
    next_power_of_2,
    num_splits,
    parts,
    prefill_config,
)
from .triton_decode import combine_kernel, decode_kernel
from .triton_prefill import prefill_kernel
from .triton_store import copy_kernel, write_kernel

name = "triton"

LOG2_E = 1.4426950408889634
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
COMBINE_STEP = 16
CHUNK_ENVIRONMENT_VARIABLE = "HF_PAGED_DECODE_CHUNK"

_chunk = int(os.environ.get(CHUNK_ENVIRONMENT_VARIABLE, "0"))


def unsupported(query_dtype: torch.dtype, storage: LayerStorage) -> str | None:
    """Why this backend cannot serve these dtypes and shapes on this device, or None."""
    key, value = storage.key_blocks, storage.value_blocks
    if key.device.type != "cuda" and not knobs.runtime.interpret:
        return f"the Triton kernels run on GPUs, the blocks are on {key.device}"
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


@contextmanager
def fixed_chunks(tokens: int) -> Iterator[None]:
    """Cut the sequence every `tokens` tokens in decode, instead of into as many pieces as fill the GPU.

    A row's result then does not depend on the other rows of the batch, to the last bit, as it does not on a CPU. The
    environment variable `HF_PAGED_DECODE_CHUNK` sets the same for a whole process.

    Raises:
        ValueError: `tokens` is no power of two of 128 or more.
    """
    global _chunk
    if tokens < 128 or tokens & (tokens - 1):
        raise ValueError(f"a chunk is a power of two of 128 tokens or more, not {tokens}")
    before, _chunk = _chunk, tokens
    try:
        yield
    finally:
        _chunk = before


@torch.no_grad()
def write(storage: LayerStorage, key: Tensor, value: Tensor, plan: GroupPlan) -> None:
    """Store the new tokens of a step; see `reference.write`."""
    native = _native(storage)
    key, value = _inner_contiguous(key), _inner_contiguous(value)
    rows, q_len = plan.positions.shape
    if rows * q_len:
        write_kernel[native.write_grid(rows * q_len)](
            key,
            value,
            storage.key_blocks,
            storage.value_blocks,
            plan.block_table,
            plan.positions,
            q_len,
            *(key.stride(0), key.stride(1), key.stride(2)),
            *(value.stride(0), value.stride(1), value.stride(2)),
            plan.block_table.stride(0),
            **native.write_constants,
        )


@torch.no_grad()
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
    query = _inner_contiguous(query)
    rows, heads, q_len, _ = query.shape
    out = query.new_empty((rows, q_len, heads, native.value_dim))
    if not out.numel():
        return out
    group = heads // native.kv_heads
    if config is None:
        config = decode_config(native.target, native.key_dim, native.value_dim, native.itemsize, group * q_len)
    products = -(-group * q_len // config.m)
    longest = plan.max_context if window is None else min(plan.max_context, window + config.tile + q_len)
    if splits is None:
        if _chunk:
            splits = max(1, -(-longest // _chunk))
        else:
            splits = num_splits(native.target, rows, native.kv_heads * products, longest, config.tile)
    partial = None
    if splits > 1:
        partial = _workspace(plan, rows * q_len * heads * splits * (native.value_dim + 4))
    decode_kernel[native.kv_heads * products, rows, splits](
        out,
        partial,
        query,
        storage.key_blocks,
        storage.value_blocks,
        plan.block_table,
        plan.positions,
        *_attention_arguments(scale, softcap, window, sinks, alibi_slopes),
        *(query.stride(0), query.stride(1), query.stride(2)),
        plan.block_table.stride(0),
        **native.attention_constants,
        KV_HEADS=native.kv_heads,
        GROUP=group,
        Q_LEN=q_len,
        SOFTCAP=softcap is not None,
        WINDOW=window is not None,
        SINKS=sinks is not None,
        ALIBI=alibi_slopes is not None,
        SPLIT=splits > 1,
        CHUNK=_chunk,
        M=config.m,
        TILE=config.tile,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    if partial is not None:
        combine_kernel[(rows * q_len * heads,)](
            out, partial, splits, native.value_dim, next_power_of_2(native.value_dim), COMBINE_STEP, num_warps=4
        )
    return out


@torch.no_grad()
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
    options = {"scale": scale, "softcap": softcap, "window": window, "sinks": sinks, "alibi_slopes": alibi_slopes}
    if q_len <= MAX_DECODE_QUERIES and config is None:
        return decode(query, storage, plan, **options)
    native = _native(storage)
    query = _inner_contiguous(query)
    out = query.new_empty((rows, q_len, heads, native.value_dim))
    if not out.numel():
        return out
    if config is None:
        config = prefill_config(native.target, native.key_dim, native.value_dim, native.itemsize)
    prefill_kernel[heads, -(-q_len // config.m), rows](
        out,
        query,
        storage.key_blocks,
        storage.value_blocks,
        plan.block_table,
        plan.positions,
        *_attention_arguments(**options),
        q_len,
        *(query.stride(0), query.stride(1), query.stride(2)),
        plan.block_table.stride(0),
        **native.attention_constants,
        GROUP=heads // native.kv_heads,
        SOFTCAP=softcap is not None,
        WINDOW=window is not None,
        SINKS=sinks is not None,
        ALIBI=alibi_slopes is not None,
        M=config.m,
        TILE=config.tile,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


@torch.no_grad()
def copy_blocks(storage: LayerStorage, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks; see `reference.copy_blocks`."""
    if not pairs:
        return
    on_device = _pairs_on(storage.device, tuple(pairs))
    for blocks in (storage.key_blocks, storage.value_blocks) if storage.kv is None else (storage.kv,):
        size = blocks[0].numel()
        width = min(4096, next_power_of_2(size))
        copy_kernel[len(pairs), -(-size // width)](blocks, on_device, blocks.stride(0), size, width, num_warps=4)


@lru_cache(maxsize=8)  # the layers of a group copy the same blocks
def _pairs_on(device: torch.device, pairs: tuple[tuple[int, int], ...]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.int32, device=device)


def _attention_arguments(
    scale: float, softcap: float | None, window: int | None, sinks: Tensor | None, alibi_slopes: Tensor | None
) -> tuple[Any, ...]:
    """The kernels' `sinks, slopes, scale, softcap, window`."""
    if softcap is None:
        factors = scale * LOG2_E, 0.0
    else:
        factors = scale / softcap, softcap * LOG2_E
    return _float32(sinks), _float32(alibi_slopes), *factors, window or 0


def _float32(per_head: Tensor | None) -> Tensor | None:
    return None if per_head is None else per_head.detach().to(torch.float32).contiguous()


def _inner_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _workspace(plan: GroupPlan, size: int) -> Tensor:
    """Float32 memory for the splits of a decode: the layers of a step run one after the other, and share it."""
    if plan.native is None or plan.native.numel() < size:
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
    """What the kernels want to know of a layer's blocks, as constants of the compilation."""

    __slots__ = (
        *("target", "kv_heads", "key_dim", "value_dim", "dim", "itemsize", "elements"),
        *("attention_constants", "write_constants"),
    )

    def __init__(self, key_blocks: Tensor, value_blocks: Tensor, target: Target) -> None:
        _, self.kv_heads, block_size, self.key_dim = key_blocks.shape
        self.target = target
        self.value_dim = value_blocks.shape[-1]
        self.dim = max(self.key_dim, self.value_dim)
        self.itemsize = key_blocks.element_size()
        self.elements = self.kv_heads * self.dim
        shapes = {
            **dict(zip(("KEY_BLOCK", "KEY_HEAD", "KEY_SLOT"), key_blocks.stride()[:3], strict=True)),
            **dict(zip(("VALUE_BLOCK", "VALUE_HEAD", "VALUE_SLOT"), value_blocks.stride()[:3], strict=True)),
            **{"KEY_DIM": self.key_dim, "VALUE_DIM": self.value_dim, "BLOCK_SIZE": block_size},
        }
        (key_1, key_2), (value_1, value_2) = parts(self.key_dim, self.itemsize), parts(self.value_dim, self.itemsize)
        self.attention_constants = {
            **shapes,
            **{"KEY_1": key_1, "KEY_2": key_2, "VALUE_1": value_1, "VALUE_2": value_2},
            # Without it the products of float32 are done in TF32, with 10 bits; three of them keep 20 and more.
            "PRECISION": "tf32x3" if self.itemsize == 4 and target.is_nvidia else "ieee",
            "enable_fp_fusion": True,
        }
        width = min(4096, next_power_of_2(self.elements))
        self.write_constants = {**shapes, "KV_HEADS": self.kv_heads, "WIDTH": width, "num_warps": 4}

    def write_grid(self, tokens: int) -> tuple[int, int]:
        return tokens, -(-self.elements // self.write_constants["WIDTH"])


def _native(storage: LayerStorage) -> NativeStorage:
    native = storage.native
    if native.__class__ is not NativeStorage:
        target = target_of(storage.device)
        native = storage.native = NativeStorage(storage.key_blocks, storage.value_blocks, target)
    return native
