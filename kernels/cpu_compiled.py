"""The loops of the CPU backend, compiled by numba: attention over blocks, and storing into them.

Compiled functions take plain addresses and strides: boxing a tensor into an array that numba knows costs more than the
attention of a short row. What a call needs stands in a table of int64, whose address the workers get.
"""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import cfunc, njit, types

from . import cpu_intrinsics
from .cpu_intrinsics import (
    LANES,
    add_atomically,
    address,
    bits_to_float,
    call,
    call_fork,
    copy,
    fill,
    fma,
    larger,
    largest_lane,
    load,
    narrow,
    offset,
    pointer,
    store,
    store_sums,
    typed,
    widen,
)

PIECE = 512  # tokens of one task
TILE = 256  # tokens between two rescalings of the softmax; their keys and values stay in the second-level cache
SCORES = TILE + 4  # between two heads' scores of a tile: four are stored at a time, which may run over the end
WRITE_SPAN = 32  # new tokens a write task stores


def _can_cache() -> bool:
    """Whether numba finds a writable place for compiled code; told to use one, it raises when there is none."""
    try:
        njit(cache=True)(_can_cache)
    except RuntimeError:
        return False
    return True


def _is_newer(module: Any) -> bool:
    """Whether a module that is compiled into this one was edited after it. numba looks at this file's time alone, and
    would go on using code that was compiled from the other as it was. Files of one installation are minutes apart."""
    return os.path.getmtime(module.__file__) > os.path.getmtime(__file__) + 300


_CACHE = _can_cache() and not _is_newer(cpu_intrinsics)
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
    return p * bits_to_float((np.int32(n) + np.int32(127)) << np.int32(23))


@_compiled
def _largest(values, count):
    """The largest of `count` values. By hand, since the compiler makes one long chain of comparisons of such a loop."""
    whole = count - count % LANES
    largest = np.float32(_LOWEST)
    if whole:
        lanes = load(values)
        for i in range(LANES, whole, LANES):
            lanes = larger(load(offset(values, i)), lanes)
        largest = largest_lane(lanes)
    for i in range(whole, count):
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
        k0, k1 = offset(key, s * stride), offset(key, s1 * stride)
        k2, k3 = offset(key, s2 * stride), offset(key, s3 * stride)
        h = 0
        while h + 2 <= heads:
            q0, q1 = offset(query, h * dim), offset(query, (h + 1) * dim)
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = fill(np.float32(0))
            for d in range(0, dim, LANES):
                x, y = load(offset(q0, d)), load(offset(q1, d))
                z = load(offset(k0, d))
                a0, b0 = fma(x, z, a0), fma(y, z, b0)
                z = load(offset(k1, d))
                a1, b1 = fma(x, z, a1), fma(y, z, b1)
                z = load(offset(k2, d))
                a2, b2 = fma(x, z, a2), fma(y, z, b2)
                z = load(offset(k3, d))
                a3, b3 = fma(x, z, a3), fma(y, z, b3)
            store_sums(offset(scores, h * SCORES + s), a0, a1, a2, a3)
            store_sums(offset(scores, (h + 1) * SCORES + s), b0, b1, b2, b3)
            h += 2
        if h < heads:
            q0 = offset(query, h * dim)
            a0 = a1 = a2 = a3 = fill(np.float32(0))
            for d in range(0, dim, LANES):
                x = load(offset(q0, d))
                a0 = fma(x, load(offset(k0, d)), a0)
                a1 = fma(x, load(offset(k1, d)), a1)
                a2 = fma(x, load(offset(k2, d)), a2)
                a3 = fma(x, load(offset(k3, d)), a3)
            store_sums(offset(scores, h * SCORES + s), a0, a1, a2, a3)


@_compiled
def _accumulate(weights, value, stride, count, heads, dim, total):
    """`total[h] += sum over s of weights[h * SCORES + s] * value[s]`, by two heads and four vectors at a time."""
    for h in range(0, heads, 2):
        other = min(h + 1, heads - 1)
        w0, w1 = offset(weights, h * SCORES), offset(weights, other * SCORES)
        t0, t1 = offset(total, h * dim), offset(total, other * dim)
        d = 0
        while d + 4 * LANES <= dim:
            a0, a1 = load(offset(t0, d)), load(offset(t0, d + LANES))
            a2, a3 = load(offset(t0, d + 2 * LANES)), load(offset(t0, d + 3 * LANES))
            b0, b1 = load(offset(t1, d)), load(offset(t1, d + LANES))
            b2, b3 = load(offset(t1, d + 2 * LANES)), load(offset(t1, d + 3 * LANES))
            v = offset(value, d)
            for s in range(count):
                x, y = fill(w0[s]), fill(w1[s])
                z = load(v)
                a0, b0 = fma(x, z, a0), fma(y, z, b0)
                z = load(offset(v, LANES))
                a1, b1 = fma(x, z, a1), fma(y, z, b1)
                z = load(offset(v, 2 * LANES))
                a2, b2 = fma(x, z, a2), fma(y, z, b2)
                z = load(offset(v, 3 * LANES))
                a3, b3 = fma(x, z, a3), fma(y, z, b3)
                v = offset(v, stride)
            store(offset(t0, d), a0)
            store(offset(t0, d + LANES), a1)
            store(offset(t0, d + 2 * LANES), a2)
            store(offset(t0, d + 3 * LANES), a3)
            store(offset(t1, d), b0)
            store(offset(t1, d + LANES), b1)
            store(offset(t1, d + 2 * LANES), b2)
            store(offset(t1, d + 3 * LANES), b3)
            d += 4 * LANES
        while d < dim:
            a0, b0 = load(offset(t0, d)), load(offset(t1, d))
            v = offset(value, d)
            for s in range(count):
                z = load(v)
                a0, b0 = fma(fill(w0[s]), z, a0), fma(fill(w1[s]), z, b0)
                v = offset(v, stride)
            store(offset(t0, d), a0)
            store(offset(t1, d), b0)
            d += LANES


@_compiled
def _softmax_tile(scores, count, scale, softcap, slope, distance, maximum, mass, total, dim):
    """Turn one head's scores into weights and rescale what was summed before to the new maximum (online softmax).

    The first of the tile is `distance` tokens from the query, and negative before it.
    """
    for s in range(count):
        scores[s] *= scale
    if softcap != 0:
        for s in range(count):
            scores[s] = softcap * math.tanh(scores[s] / softcap)
    if slope != 0:
        for s in range(count):
            scores[s] += slope * np.float32(distance + s)
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
        out[d] = narrow(total[d] * scaling, element)


@_compiled
def _read_through(address, size):
    """Read memory from end to end and do nothing with it.

    A loop of bare loads keeps so many cache misses under way that memory delivers all it can; between multiplications
    there is no room for that, and prefetch instructions are dropped when too many are pending. Reading a tile through
    and then computing on what lies in the cache is more than twice as fast as computing straight from memory.
    """
    words = pointer(address, types.int64)
    total = np.int64(0)
    for i in range(size // 8):
        total += words[i]
    return total


@_compiled
def _padded(source, stride, count, dim, padded_dim, size, scratch):
    """Vectors whose length is no multiple of `LANES`, copied to where zeros follow them: a pointer and a stride."""
    for i in range(count):
        copy(address(offset(scratch, i * padded_dim)), address(offset(source, i * stride)), dim * size)
    return scratch, padded_dim


@_compiled
def _attend_tasks(data, element):
    """Work on the tasks of one decode until none is left; several threads may do so at once.

    Args:
        data: address of the table that `start_decode` fills.
        element: any value of the type of the stored elements.
    """
    call = pointer(data, types.int64)
    numbers = pointer(data, types.float64)
    tasks = call[1]
    storage = pointer(call[2], types.int64)
    plan = pointer(call[3], types.int64)
    query_row, query_head, query_token = call[5], call[6], call[7]
    heads, window, pieces = call[9], call[12], call[14]
    scale, softcap = np.float32(numbers[10]), np.float32(numbers[11])
    has_sinks = call[13] != 0
    sinks = pointer(call[13], types.float32)
    has_slopes = call[18] != 0
    slopes = pointer(call[18], types.float32)

    key_block, key_head, key_slot = storage[1], storage[2], storage[3]
    value_block, value_head, value_slot = storage[5], storage[6], storage[7]
    block_size, kv_heads, key_dim, value_dim = storage[8], storage[9], storage[10], storage[11]
    size = storage[12]
    group = heads // kv_heads
    shift = np.int64(0)  # of a block size, which is a power of two
    while (1 << shift) < block_size:
        shift += 1
    inside = block_size - 1

    blocks = pointer(plan[0], types.int32)
    table_stride = plan[1]
    lengths = pointer(plan[2], types.int32)
    positions = pointer(plan[3], types.int32)
    q_len = plan[5]

    queries = typed(call[4], element)
    keys = typed(storage[0], element)
    values = typed(storage[4], element)
    outs = typed(call[8], element)

    # Vectors in memory of our own are filled up with zeros to whole registers.
    wide_key, wide_value = -(-key_dim // LANES) * LANES, -(-value_dim // LANES) * LANES

    # Of each (query, KV head, piece): the maximum and mass of each head, then the unnormalised output of each head.
    part = group * (wide_value + 2)
    parts = pointer(call[15], types.float32)
    unfinished = pointer(call[16], types.int64)

    filled_up = wide_key != key_dim or wide_value != value_dim
    scratch = TILE * (wide_key + wide_value) if filled_up else 0
    memory = np.zeros(group * (wide_key + SCORES) + part + scratch, dtype=np.float32)
    q = pointer(np.int64(memory.ctypes.data), types.float32)
    scores = offset(q, group * wide_key)
    own_part = offset(scores, group * SCORES)
    key_scratch = typed(address(offset(own_part, part)), element)
    value_scratch = typed(address(offset(own_part, part + TILE * wide_key)), element)

    read = np.int64(0)
    while True:
        task = add_atomically(call, 1)
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
        out = offset(outs, (n * heads + kv_head * group) * value_dim)
        if length == 0:
            if piece == 0:
                for i in range(group * value_dim):
                    out[i] = narrow(np.float32(0), element)
            continue

        first = max(np.int64(0), length - window)
        used_pieces = (length - first + PIECE - 1) // PIECE
        if piece >= used_pieces:
            continue
        start = first + piece * PIECE
        end = min(length, start + PIECE)

        state = own_part if used_pieces == 1 else offset(parts, task * part)
        maximum, mass, total = state, offset(state, group), offset(state, 2 * group)
        for h in range(group):
            maximum[h] = np.float32(_LOWEST)
            mass[h] = np.float32(0)
            source = offset(queries, row * query_row + (kv_head * group + h) * query_head + token * query_token)
            target = offset(q, h * wide_key)
            for d in range(key_dim):
                target[d] = widen(source[d])
        for i in range(group * wide_value):
            total[i] = np.float32(0)

        table = offset(blocks, row * table_stride)
        while start < end:
            count = min(end - start, TILE)
            done = 0
            while done < count:  # a run is the part of a tile that is in one block
                block, slot = np.int64(table[(start + done) >> shift]), (start + done) & inside
                run = min(block_size - slot, count - done)
                if key_slot == key_dim and value_slot == value_dim:
                    k = offset(keys, block * key_block + kv_head * key_head + slot * key_slot)
                    v = offset(values, block * value_block + kv_head * value_head + slot * value_slot)
                    read += _read_through(address(k), run * key_dim * size)
                    read += _read_through(address(v), run * value_dim * size)
                done += run
            done = 0
            while done < count:
                block, slot = np.int64(table[(start + done) >> shift]), (start + done) & inside
                run = min(block_size - slot, count - done)
                k, stride = offset(keys, block * key_block + kv_head * key_head + slot * key_slot), key_slot
                if wide_key != key_dim:
                    k, stride = _padded(k, stride, run, key_dim, wide_key, size, key_scratch)
                _dots(q, k, stride, run, group, wide_key, offset(scores, done))
                done += run
            for h in range(group):
                tile, sum_h = offset(scores, h * SCORES), offset(total, h * wide_value)
                slope = slopes[kv_head * group + h] if has_slopes else np.float32(0)
                _softmax_tile(
                    *(tile, count, scale, softcap, slope, start + 1 - length),
                    *(offset(maximum, h), offset(mass, h), sum_h, wide_value),
                )
            done = 0
            while done < count:
                block, slot = np.int64(table[(start + done) >> shift]), (start + done) & inside
                run = min(block_size - slot, count - done)
                v, stride = offset(values, block * value_block + kv_head * value_head + slot * value_slot), value_slot
                if wide_value != value_dim:
                    v, stride = _padded(v, stride, run, value_dim, wide_value, size, value_scratch)
                _accumulate(offset(scores, done), v, stride, run, group, wide_value, total)
                done += run
            start += count

        if used_pieces > 1:  # whoever is the last to finish a piece joins them all
            if add_atomically(offset(unfinished, n * kv_heads + kv_head), 1) + 1 < used_pieces:
                continue
            state = offset(parts, (task - piece) * part)
            maximum, mass, total = state, offset(state, group), offset(state, 2 * group)
            for other in range(1, used_pieces):
                _join(state, offset(state, other * part), group, wide_value)
        for h in range(group):
            sink = sinks[kv_head * group + h] if has_sinks else np.float32(0)
            sum_h, out_h = offset(total, h * wide_value), offset(out, h * value_dim)
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
    call = pointer(data, types.int64)
    tasks = call[1]
    storage = pointer(call[2], types.int64)
    plan = pointer(call[3], types.int64)
    key, key_row, key_head, key_token = call[4], call[5], call[6], call[7]
    value, value_row, value_head, value_token = call[8], call[9], call[10], call[11]
    block_size, kv_heads, size = storage[8], storage[9], storage[12]
    key_bytes, value_bytes = storage[10] * size, storage[11] * size
    blocks = pointer(plan[0], types.int32)
    positions = pointer(plan[3], types.int32)
    queries, q_len = plan[4] * plan[5], plan[5]
    while True:
        task = add_atomically(call, 1)
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
                copy(to_key + h * storage[2] * size, from_key + h * key_head, key_bytes)
                copy(to_value + h * storage[6] * size, from_value + h * value_head, value_bytes)


@_compiled
def _start(worker, fork, threads, data):
    if threads == 1:
        call(worker, data)
    else:
        call_fork(fork, worker, data, threads)


@_compiled
def start_decode(
    worker, fork, threads, storage, plan, query, query_row, query_head, query_token, out, heads, scale, softcap, window,
    sinks, slopes, longest, value_dim,
):  # fmt: skip
    """Fill the table that the tasks of a decode read, and start them."""
    kv_heads = pointer(storage, types.int64)[9]
    queries = pointer(plan, types.int64)[4] * pointer(plan, types.int64)[5]
    pieces = max(np.int64(1), (longest + PIECE - 1) // PIECE)
    tasks = queries * kv_heads * pieces
    call = np.empty(19, dtype=np.int64)
    numbers = pointer(np.int64(call.ctypes.data), types.float64)
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
    call[18] = slopes
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
def start_write(
    worker, fork, threads, storage, plan, key, key_row, key_head, key_token, value, value_row, value_head, value_token
):
    """Fill the table that the tasks of a write read, and start them; strides are in bytes."""
    queries = pointer(plan, types.int64)[4] * pointer(plan, types.int64)[5]
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
    _attend_tasks(address(data), np.float32(0))


def _decode_bfloat16(data):
    _attend_tasks(address(data), np.uint16(0))


def _decode_float16(data):
    _attend_tasks(address(data), np.int16(0))


def write_worker(data):
    _store_tasks(address(data))


@cache
def worker_address(function: Any) -> int:
    """The address of the C function `void function(void *data)`, compiled at its first use."""
    worker = cfunc(types.void(types.voidptr), cache=_CACHE)(function)
    KEPT.append(worker)
    return worker.address


KEPT: list[Any] = []
WORKERS = {
    torch.float32: _decode_float32,
    torch.bfloat16: _decode_bfloat16,
    torch.float16: _decode_float16,
}
