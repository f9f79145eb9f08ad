"""Paged attention on CPUs, compiled by numba.

Decode is one task for each (query, KV head, piece of the sequence): the task walks the blocks of its piece and serves
all query heads of the group from each block it reads, with an online softmax (arXiv 1805.02867) over tiles of tokens.
A row longer than `PIECE` tokens is split and its pieces joined afterwards (Flash-Decoding), so that one long row keeps
all cores busy. The pieces are the same whatever the batch and the number of threads: so is the result.

Prefill hands dense keys and values to torch's scaled_dot_product_attention, gathered from the blocks where a row has a
past; a few tokens behind a past (assisted decoding) go through the decode kernel, which takes any number of queries.

Half-precision blocks are widened in the kernel; everything accumulates in float32.

Compiled functions take plain addresses and strides: boxing a tensor into an array that numba knows costs more than the
attention of a short row. The shapes are those of `reference`.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model
from torch import Tensor
from torch.nn import functional as F

from hf_paged.plan import GroupPlan
from hf_paged.storage import LayerStorage

from . import reference

name = "cpu"

PIECE = 512  # tokens of one task
TILE = 128  # tokens between two rescalings of the softmax; their keys and values stay in the second-level cache
SCORES = TILE + 4  # between two heads' scores of a tile: four are stored at a time, which may run over the end
WRITE_SPAN = 32  # new tokens a write task stores
SERIAL_BYTES = 1 << 17  # below so much K/V, starting a second thread costs more than it saves
FEW_QUERIES = 16  # up to so many tokens behind a past, reading the blocks once a token beats gathering them
QUERY_CHUNK = 512  # queries that share one mask when a prompt is prefilled behind a past

_features = llvmlite.binding.get_host_cpu_features()
LANES = 16 if _features.get("avx512f") else 8 if _features.get("avx2") else 4  # float32 in a vector register


def unsupported(query_dtype: torch.dtype, storage: LayerStorage) -> str | None:
    """Why this backend cannot serve these dtypes on this device, or None."""
    key, value = storage.key_blocks, storage.value_blocks
    if key.device.type != "cpu":
        return f"the numba kernels run on the CPU, the blocks are on {key.device}"
    if not query_dtype == key.dtype == value.dtype:
        return f"the numba kernels need one dtype, got query {query_dtype}, key {key.dtype}, value {value.dtype}"
    if query_dtype not in _WORKERS:
        return f"the numba kernels serve float32, bfloat16 and float16, not {query_dtype}"
    if query_dtype == torch.float16 and not _converts_half():
        return "this CPU has no float16 conversion (F16C)"
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
    _write(
        native.write_worker,
        _FORK,
        1 if step.queries * native.token_bytes < SERIAL_BYTES else _threads(),
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
) -> Tensor:
    """Attention of one new token a row over the row's stored tokens; see `reference.decode`."""
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
    _decode(
        native.worker,
        _FORK,
        1 if step.queries * longest * native.token_bytes < SERIAL_BYTES else _threads(),
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
) -> Tensor:
    """Causal attention of a step's new tokens over what their rows have stored; see `reference.prefill`."""
    step = plan.native
    if step.__class__ is not _NativePlan:
        step = _NativePlan(plan)
    if step.prompt is None:
        step.prompt = _read_prompt(plan)
    options = (scale, softcap, window, sinks)
    if step.prompt.has_past and step.q_len <= FEW_QUERIES:
        return decode(query, storage, plan, scale=scale, softcap=softcap, window=window, sinks=sinks)
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
                past_and_new = (x[None] for x in reference.gather(storage, plan.block_table[row], length))
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
) -> Tensor:
    """Attention of queries at the given positions over dense keys and values, by torch's fused kernel if it can.

    Args:
        query: `[rows, heads, tokens, key_dim]`.
        key, value: `[rows, kv_heads, length, dim]`.
        positions: `[tokens]`, ascending, the same in all rows.

    Returns:
        `[rows, tokens, heads, value_dim]`.
    """
    if softcap is not None or sinks is not None:
        options = (positions, scale, softcap, window, sinks)
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


# Starting threads -----------------------------------------------------------------------------------------------------

_threads = torch.get_num_threads
_FORK_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_RUN_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def _find_fork() -> tuple[int, Any]:
    """The address of a C function `fork(function, data, threads, flags)` that runs `function(data)` in all threads.

    Torch's OpenMP runtime has exactly this, `GOMP_parallel`: one pool of threads then serves the matrix products and
    the attention between them, any number of Python threads may call it, and numba's layers, one of which is not
    thread-safe, stay out of it. Where torch brings no such function (macOS, Windows) Python threads do the same. The
    second value keeps the function alive.
    """
    try:
        library = ctypes.CDLL(torch._C.__file__)  # a name is looked up in the libraries it is linked with, too
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0, library
    except (AttributeError, OSError):
        callback = _FORK_TYPE(_fork_python_threads)
        return ctypes.cast(callback, ctypes.c_void_p).value or 0, callback


def _fork_python_threads(function: int, data: int, threads: int, flags: int) -> None:
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="hf_paged")
    run = _RUN_TYPE(function)  # ctypes releases the GIL around it
    helpers = [_pool.submit(run, data) for _ in range(threads - 1)]
    run(data)  # returns when no task is left, so a helper that comes late finds nothing to do
    for helper in helpers:
        helper.result()


_FORK, _fork_owner = _find_fork()


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
        self.worker = _compiled_worker(_WORKERS[key.dtype])
        self.write_worker = _compiled_worker(_write_worker)
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


# Intrinsics -----------------------------------------------------------------------------------------------------------


@intrinsic
def _pointer(typing, address, dtype):
    """`(dtype*) address`."""
    signature = types.CPointer(dtype.instance_type)(types.int64, dtype)

    def emit(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, emit


@intrinsic
def _address(typing, pointer):
    """`(int64) pointer`."""

    def emit(context, builder, signature, arguments):
        return builder.ptrtoint(arguments[0], ir.IntType(64))

    return types.int64(pointer), emit


@intrinsic
def _offset(typing, pointer, count):
    """`pointer + count`."""
    signature = pointer(pointer, types.int64)

    def emit(context, builder, signature, arguments):
        element = context.get_data_type(signature.return_type.dtype)
        return builder.gep(arguments[0], [arguments[1]], source_etype=element)

    return signature, emit


@intrinsic
def _copy(typing, destination, source, count):
    """`memcpy` between two addresses."""

    def emit(context, builder, signature, arguments):
        byte = ir.IntType(8).as_pointer()
        target, origin = (builder.inttoptr(x, byte) for x in arguments[:2])
        cgutils.raw_memcpy(builder, target, origin, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def _add_atomically(typing, pointer, amount):
    """Add to an int64 that threads share; returns what was there before."""

    def emit(context, builder, signature, arguments):
        return builder.atomic_rmw("add", arguments[0], arguments[1], "seq_cst")

    return types.int64(types.CPointer(types.int64), types.int64), emit


@intrinsic
def _bits_to_float(typing, bits):
    """The float32 that has the given int32 for its bits."""

    def emit(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), emit


@intrinsic
def _float_to_bits(typing, value):
    def emit(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), emit


@intrinsic
def _half_to_float(typing, bits):
    def emit(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), emit


@intrinsic
def _float_to_half(typing, value):
    def emit(context, builder, signature, arguments):
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), emit


class _Vector(types.Type):
    """`LANES` float32 in one register."""

    def __init__(self) -> None:
        super().__init__(name="Vector")


_vector = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, kind) -> None:
        super().__init__(manager, kind, ir.VectorType(ir.FloatType(), LANES))


@intrinsic
def _load(typing, pointer):
    """The `LANES` elements at a pointer, widened."""

    def emit(context, builder, signature, arguments):
        element = pointer.dtype
        raw = {"float32": ir.FloatType(), "uint16": ir.IntType(16), "int16": ir.HalfType()}[element.name]
        origin = builder.bitcast(arguments[0], ir.VectorType(raw, LANES).as_pointer())
        loaded = builder.load(origin, align=element.bitwidth // 8, typ=ir.VectorType(raw, LANES))
        if element == types.uint16:
            words = ir.VectorType(ir.IntType(32), LANES)
            shifted = builder.shl(builder.zext(loaded, words), ir.Constant(words, [16] * LANES))
            return builder.bitcast(shifted, ir.VectorType(ir.FloatType(), LANES))
        if element == types.int16:
            return builder.fpext(loaded, ir.VectorType(ir.FloatType(), LANES))
        return loaded

    return _vector(pointer), emit


@intrinsic
def _store(typing, pointer, vector):
    def emit(context, builder, signature, arguments):
        kind = ir.VectorType(ir.FloatType(), LANES)
        builder.store(arguments[1], builder.bitcast(arguments[0], kind.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(pointer, vector), emit


@intrinsic
def _fill(typing, value):
    """A vector with one value in all lanes."""

    def emit(context, builder, signature, arguments):
        kind = ir.VectorType(ir.FloatType(), LANES)
        first = builder.insert_element(ir.Constant(kind, ir.Undefined), arguments[0], ir.Constant(ir.IntType(32), 0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), lanes)

    return _vector(types.float32), emit


@intrinsic
def _fma(typing, a, b, c):
    """`a * b + c`, lane by lane."""

    def emit(context, builder, signature, arguments):
        product = builder.fmul(arguments[0], arguments[1], flags=["contract"])
        return builder.fadd(product, arguments[2], flags=["contract"])

    return _vector(_vector, _vector, _vector), emit


@intrinsic
def _store_sums(typing, pointer, a, b, c, d):
    """Store the four sums over the lanes of four vectors; pairwise adds share the shuffles that a sum alone needs."""

    def emit(context, builder, signature, arguments):
        def pick(x, y, lanes):
            return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))

        def fold(x, y, low, high):
            return builder.fadd(pick(x, y, low), pick(x, y, high))

        n = LANES
        # within each 4 lanes: [x0 y0 x1 y1] + [x2 y2 x3 y3]
        low = [i for q in range(0, n, 4) for i in (q, n + q, q + 1, n + q + 1)]
        high = [i for q in range(0, n, 4) for i in (q + 2, n + q + 2, q + 3, n + q + 3)]
        ab, cd = fold(arguments[1], arguments[2], low, high), fold(arguments[3], arguments[4], low, high)
        low = [i for q in range(0, n, 4) for i in (q, q + 1, n + q, n + q + 1)]
        high = [i for q in range(0, n, 4) for i in (q + 2, q + 3, n + q + 2, n + q + 3)]
        total = fold(ab, cd, low, high)
        while n > 4:
            n //= 2
            total = fold(total, total, list(range(n)), list(range(n, 2 * n)))
        kind = ir.VectorType(ir.FloatType(), 4)
        builder.store(total, builder.bitcast(arguments[0], kind.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(pointer, _vector, _vector, _vector, _vector), emit


@intrinsic
def _call(typing, function, data):
    """Call the C function `void function(void *data)` at an address."""

    def emit(context, builder, signature, arguments):
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [builder.inttoptr(arguments[1], pointer)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def _call_fork(typing, fork, function, data, threads):
    """Call `fork(function, data, threads, 0)`, see `_find_fork`."""

    def emit(context, builder, signature, arguments):
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, pointer, number, number])
        fork, function, data, threads = arguments
        builder.call(
            builder.inttoptr(fork, kind.as_pointer()),
            [
                builder.inttoptr(function, pointer),
                builder.inttoptr(data, pointer),
                builder.trunc(threads, number),
                ir.Constant(number, 0),
            ],
        )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


def _converts_half() -> bool:
    if not any(arch in llvmlite.binding.get_default_triple() for arch in ("x86_64", "i686")):
        return True
    return bool(_features.get("f16c"))


# Elements: in compiled code float32 is itself, bfloat16 has the type uint16 and float16 the type int16 --------------


def _widen(element):
    raise NotImplementedError


def _narrow(value, like):
    raise NotImplementedError


def _typed(address, element):
    raise NotImplementedError


@overload(_widen, inline="always")
def _widen_overload(element):
    if element == types.float32:
        return lambda element: element
    if element == types.int16:
        return lambda element: _half_to_float(element)
    return lambda element: _bits_to_float(np.int32(np.uint32(element) << np.uint32(16)))


@overload(_narrow)
def _narrow_overload(value, like):
    if like == types.float32:
        return lambda value, like: value
    if like == types.int16:
        return lambda value, like: _float_to_half(value)

    def round_to_even(value, like):
        if value != value:
            return np.uint16(0x7FC0)
        bits = np.uint32(_float_to_bits(value))
        return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

    return round_to_even


@overload(_typed, inline="always")
def _typed_overload(address, element):
    dtype = element
    return lambda address, element: _pointer(address, dtype)


# Compiled code --------------------------------------------------------------------------------------------------------


def _can_cache() -> bool:
    """Whether numba finds a writable place for compiled code; told to use one, it raises when there is none."""
    try:
        njit(cache=True)(_can_cache)
    except RuntimeError:
        return False
    return True


_CACHE = _can_cache()
# Not "nnan" and "ninf": a NaN that a model computes must come out as NaN.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
_compiled = njit(cache=_CACHE, nogil=True, error_model="numpy", fastmath=_FAST)
_LOWEST = float(np.finfo(np.float32).min)


@_compiled
def _exp(x):
    """e**x for x <= 0 in float32, to 2 ulp; written out so that loops over it become vector code."""
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375)  # ln 2 in two parts: the product with the first is exact
    r = r + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * _bits_to_float((np.int32(n) + np.int32(127)) << np.int32(23))


@njit(cache=_CACHE, nogil=True, fastmath=_FAST | {"nnan"})
def _largest(values, count):
    largest = values[0]
    for i in range(1, count):
        largest = max(largest, values[i])
    return largest


@_compiled
def _dots(query, key, stride, count, heads, dim, scores):
    """`scores[h * SCORES + s] = query[h] . key[s]`, by two heads and four slots at a time.

    Where slots run out, the last one is done again; what that stores is written over by the next run, or not read.
    """
    last = count - 1
    for s in range(0, count, 4):
        s1, s2, s3 = min(s + 1, last), min(s + 2, last), min(s + 3, last)
        k0, k1 = _offset(key, s * stride), _offset(key, s1 * stride)
        k2, k3 = _offset(key, s2 * stride), _offset(key, s3 * stride)
        h = 0
        while h + 2 <= heads:
            q0, q1 = _offset(query, h * dim), _offset(query, (h + 1) * dim)
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = _fill(np.float32(0))
            for d in range(0, dim, LANES):
                x, y = _load(_offset(q0, d)), _load(_offset(q1, d))
                z = _load(_offset(k0, d))
                a0, b0 = _fma(x, z, a0), _fma(y, z, b0)
                z = _load(_offset(k1, d))
                a1, b1 = _fma(x, z, a1), _fma(y, z, b1)
                z = _load(_offset(k2, d))
                a2, b2 = _fma(x, z, a2), _fma(y, z, b2)
                z = _load(_offset(k3, d))
                a3, b3 = _fma(x, z, a3), _fma(y, z, b3)
            _store_sums(_offset(scores, h * SCORES + s), a0, a1, a2, a3)
            _store_sums(_offset(scores, (h + 1) * SCORES + s), b0, b1, b2, b3)
            h += 2
        if h < heads:
            q0 = _offset(query, h * dim)
            a0 = a1 = a2 = a3 = _fill(np.float32(0))
            for d in range(0, dim, LANES):
                x = _load(_offset(q0, d))
                a0 = _fma(x, _load(_offset(k0, d)), a0)
                a1 = _fma(x, _load(_offset(k1, d)), a1)
                a2 = _fma(x, _load(_offset(k2, d)), a2)
                a3 = _fma(x, _load(_offset(k3, d)), a3)
            _store_sums(_offset(scores, h * SCORES + s), a0, a1, a2, a3)


@_compiled
def _accumulate(weights, value, stride, count, heads, dim, total):
    """`total[h] += sum over s of weights[h * SCORES + s] * value[s]`, by two heads and four vectors at a time."""
    for h in range(0, heads, 2):
        other = min(h + 1, heads - 1)
        w0, w1 = _offset(weights, h * SCORES), _offset(weights, other * SCORES)
        t0, t1 = _offset(total, h * dim), _offset(total, other * dim)
        d = 0
        while d + 4 * LANES <= dim:
            a0, a1 = _load(_offset(t0, d)), _load(_offset(t0, d + LANES))
            a2, a3 = _load(_offset(t0, d + 2 * LANES)), _load(_offset(t0, d + 3 * LANES))
            b0, b1 = _load(_offset(t1, d)), _load(_offset(t1, d + LANES))
            b2, b3 = _load(_offset(t1, d + 2 * LANES)), _load(_offset(t1, d + 3 * LANES))
            v = _offset(value, d)
            for s in range(count):
                x, y = _fill(w0[s]), _fill(w1[s])
                z = _load(v)
                a0, b0 = _fma(x, z, a0), _fma(y, z, b0)
                z = _load(_offset(v, LANES))
                a1, b1 = _fma(x, z, a1), _fma(y, z, b1)
                z = _load(_offset(v, 2 * LANES))
                a2, b2 = _fma(x, z, a2), _fma(y, z, b2)
                z = _load(_offset(v, 3 * LANES))
                a3, b3 = _fma(x, z, a3), _fma(y, z, b3)
                v = _offset(v, stride)
            _store(_offset(t0, d), a0)
            _store(_offset(t0, d + LANES), a1)
            _store(_offset(t0, d + 2 * LANES), a2)
            _store(_offset(t0, d + 3 * LANES), a3)
            _store(_offset(t1, d), b0)
            _store(_offset(t1, d + LANES), b1)
            _store(_offset(t1, d + 2 * LANES), b2)
            _store(_offset(t1, d + 3 * LANES), b3)
            d += 4 * LANES
        while d < dim:
            a0, b0 = _load(_offset(t0, d)), _load(_offset(t1, d))
            v = _offset(value, d)
            for s in range(count):
                z = _load(v)
                a0, b0 = _fma(_fill(w0[s]), z, a0), _fma(_fill(w1[s]), z, b0)
                v = _offset(v, stride)
            _store(_offset(t0, d), a0)
            _store(_offset(t1, d), b0)
            d += LANES


@_compiled
def _softmax_tile(scores, count, scale, softcap, maximum, mass, total, dim):
    """Turn one head's scores into weights and rescale what was summed before to the new maximum (online softmax)."""
    for s in range(count):
        scores[s] *= scale
    if softcap != 0:
        for s in range(count):
            scores[s] = softcap * math.tanh(scores[s] / softcap)
    largest = _largest(scores, count)
    if largest > maximum[0]:
        shrink = _exp(maximum[0] - largest)
        maximum[0] = largest
        mass[0] *= shrink
        for d in range(dim):
            total[d] *= shrink
    shift = maximum[0]
    summed = np.float32(0)
    for s in range(count):
        weight = _exp(scores[s] - shift)
        scores[s] = weight
        summed += weight
    mass[0] += summed


@_compiled
def _finish(maximum, mass, total, dim, sink, has_sink, out, element):
    """Divide by the softmax's mass, to which a sink adds, and store in the query's dtype."""
    scaling = np.float32(1)
    if has_sink:
        if sink > maximum:
            scaling = _exp(maximum - sink)
            mass = mass * scaling + np.float32(1)
        else:
            mass += _exp(sink - maximum)
    scaling /= mass
    for d in range(dim):
        out[d] = _narrow(total[d] * scaling, element)


@_compiled
def _read_through(address, size):
    """Read memory from end to end and do nothing with it.

    A loop of bare loads keeps so many cache misses under way that memory delivers all it can; between multiplications
    there is no room for that, and prefetch instructions are dropped when too many are pending. Reading a tile through
    and then computing on what lies in the cache is more than twice as fast as computing straight from memory.
    """
    words = _pointer(address, types.int64)
    total = np.int64(0)
    for i in range(size // 8):
        total += words[i]
    return total


@_compiled
def _padded(source, stride, count, dim, padded_dim, size, scratch):
    """Vectors whose length is no multiple of `LANES`, copied to where zeros follow them: a pointer and a stride."""
    for i in range(count):
        _copy(_address(_offset(scratch, i * padded_dim)), _address(_offset(source, i * stride)), dim * size)
    return scratch, padded_dim


@_compiled
def _attend_tasks(data, element):
    """Work on the tasks of one decode until none is left; several threads may do so at once.

    Args:
        data: address of the table that `_decode` fills.
        element: any value of the type of the stored elements.
    """
    call = _pointer(data, types.int64)
    numbers = _pointer(data, types.float64)
    tasks = call[1]
    storage = _pointer(call[2], types.int64)
    plan = _pointer(call[3], types.int64)
    query_row, query_head, query_token = call[5], call[6], call[7]
    heads, window, pieces = call[9], call[12], call[14]
    scale, softcap = np.float32(numbers[10]), np.float32(numbers[11])
    has_sinks = call[13] != 0
    sinks = _pointer(call[13], types.float32)

    key_block, key_head, key_slot = storage[1], storage[2], storage[3]
    value_block, value_head, value_slot = storage[5], storage[6], storage[7]
    block_size, kv_heads, key_dim, value_dim = storage[8], storage[9], storage[10], storage[11]
    size = storage[12]
    group = heads // kv_heads
    shift = np.int64(0)  # of a block size, which is a power of two
    while (1 << shift) < block_size:
        shift += 1
    inside = block_size - 1

    blocks = _pointer(plan[0], types.int32)
    table_stride = plan[1]
    lengths = _pointer(plan[2], types.int32)
    positions = _pointer(plan[3], types.int32)
    q_len = plan[5]

    queries = _typed(call[4], element)
    keys = _typed(storage[0], element)
    values = _typed(storage[4], element)
    outs = _typed(call[8], element)

    # Vectors in memory of our own are filled up with zeros to whole registers.
    wide_key, wide_value = -(-key_dim // LANES) * LANES, -(-value_dim // LANES) * LANES

    # Of each (query, KV head, piece): the maximum and mass of each head, then the unnormalised output of each head.
    part = group * (wide_value + 2)
    parts = _pointer(call[15], types.float32)
    unfinished = _pointer(call[16], types.int64)

    memory = np.zeros(group * (wide_key + SCORES) + part + TILE * (wide_key + wide_value), dtype=np.float32)
    q = _pointer(np.int64(memory.ctypes.data), types.float32)
    scores = _offset(q, group * wide_key)
    own_part = _offset(scores, group * SCORES)
    key_scratch = _typed(_address(_offset(own_part, part)), element)
    value_scratch = _typed(_address(_offset(own_part, part + TILE * wide_key)), element)

    read = np.int64(0)
    while True:
        task = _add_atomically(call, 1)
        if task >= tasks:
            call[17] = read  # so that the compiler does not leave out the reading
            break
        piece = task % pieces
        kv_head = (task // pieces) % kv_heads
        n = task // (pieces * kv_heads)  # the query, counted over rows and tokens
        row, token = n // q_len, n % q_len

        length = np.int64(0)
        if positions[n] >= 0:
            length = np.int64(lengths[row]) if q_len == 1 else np.int64(positions[n]) + 1
        out = _offset(outs, (n * heads + kv_head * group) * value_dim)
        if length == 0:
            if piece == 0:
                for i in range(group * value_dim):
                    out[i] = _narrow(np.float32(0), element)
            continue

        first = max(np.int64(0), length - window)
        used_pieces = (length - first + PIECE - 1) // PIECE
        if piece >= used_pieces:
            continue
        start = first + piece * PIECE
        end = min(length, start + PIECE)

        state = own_part if used_pieces == 1 else _offset(parts, task * part)
        maximum, mass, total = state, _offset(state, group), _offset(state, 2 * group)
        for h in range(group):
            maximum[h] = np.float32(_LOWEST)
            mass[h] = np.float32(0)
            source = _offset(queries, row * query_row + (kv_head * group + h) * query_head + token * query_token)
            target = _offset(q, h * wide_key)
            for d in range(key_dim):
                target[d] = _widen(source[d])
        for i in range(group * wide_value):
            total[i] = np.float32(0)

        table = _offset(blocks, row * table_stride)
        while start < end:
            count = min(end - start, TILE)
            done = 0
            while done < count:  # a run is the part of a tile that is in one block
                block, slot = np.int64(table[(start + done) >> shift]), (start + done) & inside
                run = min(block_size - slot, count - done)
                if key_slot == key_dim and value_slot == value_dim:
                    k = _offset(keys, block * key_block + kv_head * key_head + slot * key_slot)
                    v = _offset(values, block * value_block + kv_head * value_head + slot * value_slot)
                    read += _read_through(_address(k), run * key_dim * size)
                    read += _read_through(_address(v), run * value_dim * size)
                done += run
            done = 0
            while done < count:
                block, slot = np.int64(table[(start + done) >> shift]), (start + done) & inside
                run = min(block_size - slot, count - done)
                k, stride = _offset(keys, block * key_block + kv_head * key_head + slot * key_slot), key_slot
                if wide_key != key_dim:
                    k, stride = _padded(k, stride, run, key_dim, wide_key, size, key_scratch)
                _dots(q, k, stride, run, group, wide_key, _offset(scores, done))
                done += run
            for h in range(group):
                tile, sum_h = _offset(scores, h * SCORES), _offset(total, h * wide_value)
                _softmax_tile(tile, count, scale, softcap, _offset(maximum, h), _offset(mass, h), sum_h, wide_value)
            done = 0
            while done < count:
                block, slot = np.int64(table[(start + done) >> shift]), (start + done) & inside
                run = min(block_size - slot, count - done)
                v, stride = _offset(values, block * value_block + kv_head * value_head + slot * value_slot), value_slot
                if wide_value != value_dim:
                    v, stride = _padded(v, stride, run, value_dim, wide_value, size, value_scratch)
                _accumulate(_offset(scores, done), v, stride, run, group, wide_value, total)
                done += run
            start += count

        if used_pieces > 1:  # whoever is the last to finish a piece joins them all
            if _add_atomically(_offset(unfinished, n * kv_heads + kv_head), 1) + 1 < used_pieces:
                continue
            state = _offset(parts, (task - piece) * part)
            maximum, mass, total = state, _offset(state, group), _offset(state, 2 * group)
            for other in range(1, used_pieces):
                _join(state, _offset(state, other * part), group, wide_value)
        for h in range(group):
            sink = sinks[kv_head * group + h] if has_sinks else np.float32(0)
            sum_h, out_h = _offset(total, h * wide_value), _offset(out, h * value_dim)
            _finish(maximum[h], mass[h], sum_h, value_dim, sink, has_sinks, out_h, element)


@_compiled
def _join(one, other, group, dim):
    """Add the softmax state of a piece to that of another."""
    for h in range(group):
        a, b = one[h], other[h]
        largest = max(a, b)
        keep, take = _exp(a - largest), _exp(b - largest)
        one[h] = largest
        one[group + h] = one[group + h] * keep + other[group + h] * take
        for d in range(2 * group + h * dim, 2 * group + (h + 1) * dim):
            one[d] = one[d] * keep + other[d] * take


@_compiled
def _store_tasks(data):
    """Work on the tasks of one write until none is left; several threads may do so at once."""
    call = _pointer(data, types.int64)
    tasks = call[1]
    storage = _pointer(call[2], types.int64)
    plan = _pointer(call[3], types.int64)
    key, key_row, key_head, key_token = call[4], call[5], call[6], call[7]
    value, value_row, value_head, value_token = call[8], call[9], call[10], call[11]
    block_size, kv_heads, size = storage[8], storage[9], storage[12]
    key_bytes, value_bytes = storage[10] * size, storage[11] * size
    blocks = _pointer(plan[0], types.int32)
    positions = _pointer(plan[3], types.int32)
    queries, q_len = plan[4] * plan[5], plan[5]
    while True:
        task = _add_atomically(call, 1)
        if task >= tasks:
            break
        for n in range(task * WRITE_SPAN, min(queries, (task + 1) * WRITE_SPAN)):
            position = np.int64(positions[n])
            if position < 0:
                continue
            row, token = n // q_len, n % q_len
            block, slot = np.int64(blocks[row * plan[1] + position // block_size]), position % block_size
            to_key = storage[0] + (block * storage[1] + slot * storage[3]) * size
            to_value = storage[4] + (block * storage[5] + slot * storage[7]) * size
            from_key = key + row * key_row + token * key_token
            from_value = value + row * value_row + token * value_token
            for h in range(kv_heads):
                _copy(to_key + h * storage[2] * size, from_key + h * key_head, key_bytes)
                _copy(to_value + h * storage[6] * size, from_value + h * value_head, value_bytes)


@_compiled
def _start(worker, fork, threads, data):
    if threads == 1:
        _call(worker, data)
    else:
        _call_fork(fork, worker, data, threads)


@_compiled
def _decode(
    worker, fork, threads, storage, plan, query, query_row, query_head, query_token, out, heads, scale, softcap, window,
    sinks, longest, value_dim,
):  # fmt: skip
    """Fill the table that the tasks of a decode read, and start them."""
    kv_heads = _pointer(storage, types.int64)[9]
    queries = _pointer(plan, types.int64)[4] * _pointer(plan, types.int64)[5]
    pieces = max(np.int64(1), (longest + PIECE - 1) // PIECE)
    tasks = queries * kv_heads * pieces
    call = np.empty(18, dtype=np.int64)
    numbers = _pointer(np.int64(call.ctypes.data), types.float64)
    call[0] = 0
    call[1] = tasks
    call[2] = storage
    call[3] = plan
    call[4] = query
    call[5] = query_row
    call[6] = query_head
    call[7] = query_token
    call[8] = out
    call[9] = heads
    numbers[10] = scale
    numbers[11] = softcap
    call[12] = window
    call[13] = sinks
    call[14] = pieces
    if pieces > 1:
        parts = np.empty(tasks * (heads // kv_heads) * (-(-value_dim // LANES) * LANES + 2), dtype=np.float32)
        unfinished = np.zeros(queries * kv_heads, dtype=np.int64)
        call[15] = np.int64(parts.ctypes.data)
        call[16] = np.int64(unfinished.ctypes.data)
        _start(worker, fork, threads, np.int64(call.ctypes.data))
        parts[0] = np.float32(unfinished[0])  # both are alive until here
    else:
        _start(worker, fork, threads, np.int64(call.ctypes.data))
    call[0] = 0


@_compiled
def _write(
    worker, fork, threads, storage, plan, key, key_row, key_head, key_token, value, value_row, value_head, value_token
):
    """Fill the table that the tasks of a write read, and start them; strides are in bytes."""
    queries = _pointer(plan, types.int64)[4] * _pointer(plan, types.int64)[5]
    call = np.empty(12, dtype=np.int64)
    call[0] = 0
    call[1] = (queries + WRITE_SPAN - 1) // WRITE_SPAN
    call[2] = storage
    call[3] = plan
    call[4] = key
    call[5] = key_row
    call[6] = key_head
    call[7] = key_token
    call[8] = value
    call[9] = value_row
    call[10] = value_head
    call[11] = value_token
    _start(worker, fork, threads, np.int64(call.ctypes.data))
    call[0] = 0


def _decode_float32(data):
    _attend_tasks(_address(data), np.float32(0))


def _decode_bfloat16(data):
    _attend_tasks(_address(data), np.uint16(0))


def _decode_float16(data):
    _attend_tasks(_address(data), np.int16(0))


def _write_worker(data):
    _store_tasks(_address(data))


@cache
def _compiled_worker(function: Any) -> int:
    """The address of the C function `void function(void *data)`, compiled at its first use."""
    worker = cfunc(types.void(types.voidptr), cache=_CACHE)(function)
    _kept.append(worker)
    return worker.address


_kept: list[Any] = []
_WORKERS = {
    torch.float32: _decode_float32,
    torch.bfloat16: _decode_bfloat16,
    torch.float16: _decode_float16,
}
