"""Paged attention on CPUs, compiled by numba.

Decode is one task for each (query, KV head, piece of the sequence): the task walks the blocks of its piece and serves
all query heads of the group from each block it reads, with an online softmax (arXiv 1805.02867) over tiles of tokens.
A row longer than `PIECE` tokens is split and its pieces joined afterwards (Flash-Decoding), so that one long row keeps
all cores busy. The pieces are the same whatever the batch and the number of threads: so is the result.

Prefill hands dense keys and values to torch's scaled_dot_product_attention, gathered from the blocks where a row has a
past; a few tokens behind a past (assisted decoding) go through the decode kernel, which takes any number of queries.

Half-precision blocks are widened in the kernel; everything accumulates in float32.

The loops themselves are in `cpu_compiled`; here is what is done once a call, in Python. The shapes are those of
`reference`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_paged.plan import GroupPlan
from hf_paged.storage import LayerStorage

from . import reference
from .cpu_compiled import WORKERS, start_decode, start_write, worker_address, write_worker
from .cpu_intrinsics import converts_half
from .cpu_threads import FORK

name = "cpu"

SERIAL_BYTES = 1 << 17  # below so much K/V, starting a second thread costs more than it saves
FEW_QUERIES = 16  # up to so many tokens behind a past, reading the blocks once a token beats gathering them
QUERY_CHUNK = 512  # queries that share one mask when a prompt is prefilled behind a past


def unsupported(query_dtype: torch.dtype, storage: LayerStorage) -> str | None:
    """Why this backend cannot serve these dtypes on this device, or None."""
    key, value = storage.key_blocks, storage.value_blocks
    if key.device.type != "cpu":
        return f"the numba kernels run on the CPU, the blocks are on {key.device}"
    if not query_dtype == key.dtype == value.dtype:
        return f"the numba kernels need one dtype, got query {query_dtype}, key {key.dtype}, value {value.dtype}"
    if query_dtype not in WORKERS:
        return f"the numba kernels serve float32, bfloat16 and float16, not {query_dtype}"
    if query_dtype == torch.float16 and not converts_half():
        return "this CPU has no float16 conversion (F16C)"
    return None


def serves_graphs(device: torch.device) -> bool:
    """Whether a step may be part of a graph that torch compiles."""
    return True


def graph_key() -> object:
    """What a CUDA graph that was captured now would go on with, besides its tensors."""
    return None


def write(storage: LayerStorage, key: Tensor, value: Tensor, plan: GroupPlan) -> None:
    """Store the new tokens of a step; see `reference.write`."""
    native = storage.native
    if native.__class__ is not _NativeStorage:
        native = _NativeStorage(storage)
    step = plan.native
    if step.__class__ is not _NativePlan:
        step = _NativePlan(plan)
    key_row, key_head, key_token, key_last = key.stride()
    value_row, value_head, value_token, value_last = value.stride()
    if key_last != 1 or value_last != 1:
        return write(storage, key.contiguous(), value.contiguous(), plan)
    size = native.itemsize
    start_write(
        native.write_worker,
        FORK,
        1 if step.queries * native.token_bytes < SERIAL_BYTES else torch.get_num_threads(),
        native.address,
        step.address,
        key.data_ptr(),
        key_row * size,
        key_head * size,
        key_token * size,
        value.data_ptr(),
        value_row * size,
        value_head * size,
        value_token * size,
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
) -> Tensor:
    """Attention of one new token a row, or a few, over the row's stored tokens; see `reference.decode`."""
    native = storage.native
    if native.__class__ is not _NativeStorage:
        native = _NativeStorage(storage)
    step = plan.native
    if step.__class__ is not _NativePlan:
        step = _NativePlan(plan)
    row, head, token, last = query.stride()
    if last != 1:
        query = query.contiguous()
        row, head, token, last = query.stride()
    heads = query.shape[1]
    out = query.new_empty((step.rows, step.q_len, heads, native.value_dim))
    longest = plan.max_context
    if window is None:
        window = longest + 1
    elif window < longest:
        longest = window
    if sinks is not None:
        sinks = sinks.detach().to(torch.float32).contiguous()
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.detach().to(torch.float32).contiguous()
    start_decode(
        native.worker,
        FORK,
        1 if step.queries * longest * native.token_bytes < SERIAL_BYTES else torch.get_num_threads(),
        native.address,
        step.address,
        query.data_ptr(),
        row,
        head,
        token,
        out.data_ptr(),
        heads,
        scale,
        softcap or 0.0,
        window,
        0 if sinks is None else sinks.data_ptr(),
        0 if alibi_slopes is None else alibi_slopes.data_ptr(),
        longest,
        native.value_dim,
    )
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
) -> Tensor:
    """Causal attention of a step's new tokens over what their rows have stored; see `reference.prefill`."""
    step = plan.native
    if step.__class__ is not _NativePlan:
        step = _NativePlan(plan)
    if step.prompt is None:
        step.prompt = _read_prompt(plan)
    options = (scale, softcap, window, sinks, alibi_slopes)
    if step.prompt.has_past and step.q_len <= FEW_QUERIES:
        names = ("scale", "softcap", "window", "sinks", "alibi_slopes")
        return decode(query, storage, plan, **dict(zip(names, options, strict=True)))
    with torch.no_grad():
        if step.prompt.dense:
            return _attend(query, key, value, torch.arange(step.q_len), *options).contiguous()
        out = query.new_zeros(step.rows, step.q_len, query.shape[1], value.shape[-1])
        for row, (real, positions, length) in enumerate(step.prompt.rows):
            if len(positions) == 0:
                continue
            if length == len(positions):
                past_and_new = key[row, None, :, real], value[row, None, :, real]
            else:
                start = reference.window_start(int(positions[0]), window)
                past_and_new = (x[None] for x in reference.gather(storage, plan.block_table[row], length, start))
                positions = positions - start
            out[row, real] = _attend(query[row, None, :, real], *past_and_new, positions, *options)[0]
    return out


def copy_blocks(storage: LayerStorage, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks; see `reference.copy_blocks`."""
    with torch.no_grad():
        for blocks in (storage.key_blocks, storage.value_blocks) if storage.kv is None else (storage.kv,):
            for source, destination in pairs:
                blocks[destination].copy_(blocks[source])


# Prefill --------------------------------------------------------------------------------------------------------------


class _Prompt(NamedTuple):
    """What prefill wants to know of a plan."""

    has_past: bool  # whether any row had tokens before this step
    dense: bool  # whether all rows are new and none has a pad
    rows: list[tuple[slice | Tensor, Tensor, int]]  # where a row's real tokens are, their positions, the row's length


def _read_prompt(plan: GroupPlan) -> _Prompt:
    rows = []
    for positions, length in zip(plan.positions, plan.context_lens.tolist(), strict=True):
        real = torch.nonzero(positions >= 0).flatten()
        where: slice | Tensor = real
        if len(real) and int(real[-1] - real[0]) == len(real) - 1:  # without holes: a view instead of a copy
            where = slice(int(real[0]), int(real[-1]) + 1)
        rows.append((where, positions[where].long(), length if len(real) else 0))
    has_past = any(length > len(positions) for _, positions, length in rows)
    dense = all(len(positions) == length == plan.positions.shape[1] for _, positions, length in rows)
    return _Prompt(has_past, dense, rows)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """Attention of queries at the given positions over dense keys and values, by torch's fused kernel if it can.

    Args:
        query: `[rows, heads, tokens, key_dim]`.
        key, value: `[rows, kv_heads, length, dim]`.
        positions: `[tokens]`, ascending, the same in all rows.

    Returns:
        `[rows, tokens, heads, value_dim]`.
    """
    if softcap is not None or sinks is not None or alibi_slopes is not None:
        options = (positions, scale, softcap, window, sinks, alibi_slopes)
        return torch.stack([reference.attend(*qkv, *options) for qkv in zip(query, key, value, strict=True)])
    tokens, length = query.shape[2], key.shape[2]
    if tokens == length and (window is None or window >= length):
        return _fused(query, key, value, None, scale)
    parts = []
    for start in range(0, tokens, QUERY_CHUNK):
        where = positions[start : start + QUERY_CHUNK, None]
        first = 0 if window is None else max(0, int(where[0]) - window + 1)
        end = int(where[-1]) + 1
        place = torch.arange(first, end)
        mask = place <= where  # [chunk, end - first]
        if window is not None:
            mask &= place > where - window
        chunk = query[:, :, start : start + QUERY_CHUNK]
        parts.append(_fused(chunk, key[:, :, first:end], value[:, :, first:end], mask, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """scaled_dot_product_attention, causal without a mask; returns `[rows, tokens, heads, value_dim]`."""
    value_dim = value.shape[-1]
    excess = query.shape[-1] - value_dim  # torch's fused kernel wants one width: fill up with zeros
    if excess > 0:
        value = F.pad(value, (0, excess))
    elif excess < 0:
        query, key = F.pad(query, (0, -excess)), F.pad(key, (0, -excess))
    gqa = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa
    )
    return out[..., :value_dim].transpose(1, 2)


# What compiled code reads: tables of int64, passed by address ---------------------------------------------------------


class _NativeStorage:
    """Addresses and strides of a layer's blocks, and the compiled code for their dtype."""

    __slots__ = ("table", "address", "itemsize", "token_bytes", "value_dim", "worker", "write_worker")

    def __init__(self, storage: LayerStorage) -> None:
        key, value = storage.key_blocks, storage.value_blocks
        _, kv_heads, block_size, key_dim = key.shape
        self.value_dim = value.shape[-1]
        self.itemsize = key.element_size()
        self.token_bytes = kv_heads * (key_dim + self.value_dim) * self.itemsize
        self.table = np.array(
            [
                *(key.data_ptr(), *key.stride()[:3]),
                *(value.data_ptr(), *value.stride()[:3]),
                *(block_size, kv_heads, key_dim, self.value_dim, self.itemsize),
            ],
            dtype=np.int64,
        )
        self.address = self.table.ctypes.data
        self.worker = worker_address(WORKERS[key.dtype])
        self.write_worker = worker_address(write_worker)
        storage.native = self


class _NativePlan:
    """Addresses of a plan's tensors."""

    __slots__ = ("table", "address", "rows", "q_len", "queries", "prompt")

    def __init__(self, plan: GroupPlan) -> None:
        self.rows, self.q_len = plan.positions.shape
        self.queries = self.rows * self.q_len
        self.prompt: _Prompt | None = None
        table, lengths, positions = plan.block_table, plan.context_lens, plan.positions
        self.table = np.array(
            [table.data_ptr(), table.stride(0), lengths.data_ptr(), positions.data_ptr(), self.rows, self.q_len],
            dtype=np.int64,
        )
        self.address = self.table.ctypes.data
        plan.native = self
