"""The decode kernel: a few new tokens a row over what the row has stored, read through its block table.

A program serves one row, one KV head and one piece ("split") of the row's tokens: all query heads of the group, and
all new tokens of the row, are the rows of one matrix product, so that every key and value is read once. A split keeps
an online softmax (arXiv 1805.02867); where there are several, `combine_kernel` joins them (Flash-Decoding).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_common import LOG2_E, LOWEST, attend_tile, load_ids, load_query, store_part


@triton.jit(do_not_specialize=["table_row"])
def decode_kernel(
    out, partial, query, key_blocks, value_blocks, block_table, positions, sinks, slopes,
    scale, softcap, window,
    query_row, query_head, query_token, table_row,
    KEY_BLOCK: tl.constexpr, KEY_HEAD: tl.constexpr, KEY_SLOT: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, VALUE_HEAD: tl.constexpr, VALUE_SLOT: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, Q_LEN: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr,
    SPLIT: tl.constexpr, CHUNK: tl.constexpr,
    M: tl.constexpr, TILE: tl.constexpr,
    KEY_1: tl.constexpr, KEY_2: tl.constexpr, VALUE_1: tl.constexpr, VALUE_2: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid `(KV_HEADS * cdiv(GROUP * Q_LEN, M), rows, splits)`.

    Args:
        out: `[rows, Q_LEN, heads, VALUE_DIM]`, contiguous, written when not `SPLIT`.
        partial: float32 `[rows * Q_LEN * heads, splits, VALUE_DIM + 4]` when `SPLIT`: each split's output, then the
            logarithm of its softmax mass, then nothing, for the alignment.
        query: `[rows, heads, Q_LEN, KEY_DIM]`, last stride 1.
        key_blocks, value_blocks: `[blocks, KV_HEADS, BLOCK_SIZE, dim]` of the strides given, last stride 1.
        block_table: int32 `[rows, >= blocks of the longest row]`.
        positions: int32 `[rows, Q_LEN]`, -1 where nothing is asked.
        sinks, slopes: `[heads]`, read with `SINKS` and `ALIBI`.
        scale: of the products, times log2(e); with `SOFTCAP` divided by the cap instead, `softcap` being the cap
            times log2(e).
        CHUNK: tokens of a split; 0 for the row's tokens shared out evenly.
    """
    tiles: tl.constexpr = (GROUP * Q_LEN + M - 1) // M
    kv_head = tl.program_id(0) // tiles
    row = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)

    m = (tl.program_id(0) % tiles) * M + tl.arange(0, M)
    in_m = m < GROUP * Q_LEN
    token = m // GROUP
    head = kv_head * GROUP + m % GROUP

    if Q_LEN == 1:
        position = tl.load(positions + row)
        end = position + 1
        lowest = position
    else:
        position = tl.load(positions + row * Q_LEN + token, mask=in_m, other=-1)
        end = tl.max(position, 0) + 1
        lowest = tl.min(tl.where(position >= 0, position, 2147483647), 0)
    first = 0
    if WINDOW:
        first = tl.maximum(tl.minimum(lowest, end) - window + 1, 0)
    start = first // TILE * TILE
    if CHUNK > 0:
        start += split * CHUNK
        stop = tl.minimum(start + CHUNK, end)
    else:
        share = tl.cdiv(tl.cdiv(end - start, TILE), splits) * TILE
        start += split * share
        stop = tl.minimum(start + share, end)

    pointers = query + row.to(tl.int64) * query_row + head.to(tl.int64) * query_head + token.to(tl.int64) * query_token
    q1 = load_query(pointers, in_m, 0, KEY_1, KEY_DIM)
    q2 = q1
    if KEY_2 > 0:
        q2 = load_query(pointers, in_m, KEY_1, KEY_2, KEY_DIM)
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + head, mask=in_m, other=0.0).to(tl.float32) * LOG2_E

    maximum = tl.full([M], LOWEST, tl.float32)
    mass = tl.zeros([M], tl.float32)
    if SINKS:
        if split == 0:
            sink = tl.load(sinks + head, mask=in_m, other=0.0).to(tl.float32) * LOG2_E
            maximum = tl.maximum(sink, LOWEST)
            mass += 1.0
    sum1 = tl.zeros([M, VALUE_1], tl.float32)
    sum2 = tl.zeros([M, VALUE_2 if VALUE_2 > 0 else 16], tl.float32)

    # Ids are loaded a turn ahead: one that is loaded in the turn that needs it costs the pipeline a buffer.
    table = block_table + row * table_row
    ids = load_ids(table, start, stop, TILE, BLOCK_SIZE)
    for n in tl.range(start, stop, TILE):
        next_ids = load_ids(table, n + TILE, stop, TILE, BLOCK_SIZE)
        maximum, mass, sum1, sum2 = attend_tile(
            q1, q2, ids, n, first, stop, position, slope, kv_head, key_blocks, value_blocks, scale, softcap, window,
            maximum, mass, sum1, sum2,
            KEY_BLOCK, KEY_HEAD, KEY_SLOT, VALUE_BLOCK, VALUE_HEAD, VALUE_SLOT, KEY_DIM, VALUE_DIM, BLOCK_SIZE, TILE,
            KEY_1, KEY_2, VALUE_1, VALUE_2, SOFTCAP, WINDOW, ALIBI, True, Q_LEN > 1, PRECISION,
        )  # fmt: skip
        ids = next_ids

    scaling = 1.0 / tl.where(mass == 0.0, 1.0, mass)
    query_index = ((row * Q_LEN + token) * (KV_HEADS * GROUP) + head).to(tl.int64)
    if SPLIT:
        target = partial + (query_index * splits + split) * (VALUE_DIM + 4)
        log_mass = tl.where(mass == 0.0, float("-inf"), maximum + tl.log2(mass))
        tl.store(target + VALUE_DIM, log_mass, mask=in_m)
        in_m = in_m & (mass != 0.0)  # the output of the others is not read
    else:
        target = out + query_index * VALUE_DIM
    store_part(target, sum1 * scaling[:, None], in_m, 0, VALUE_1, VALUE_DIM)
    if VALUE_2 > 0:
        store_part(target, sum2 * scaling[:, None], in_m, VALUE_1, VALUE_2, VALUE_DIM)


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(out, partial, splits, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """Join the splits of one query head; grid `(rows * Q_LEN * heads,)`, arguments as of `decode_kernel`.

    It takes `STEP` splits at a time, in order: splits that hold nothing, however many, leave the result as it is to
    the last bit.
    """
    source = partial + tl.program_id(0).to(tl.int64) * splits * (VALUE_DIM + 4)
    d = tl.arange(0, WIDTH)
    maximum = LOWEST
    mass = 0.0
    total = tl.zeros([WIDTH], tl.float32)
    for begin in tl.range(0, splits, STEP):
        split = begin + tl.arange(0, STEP)
        log_mass = tl.load(source + split * (VALUE_DIM + 4) + VALUE_DIM, mask=split < splits, other=float("-inf"))
        used = log_mass != float("-inf")
        parts = tl.load(
            source + split[:, None] * (VALUE_DIM + 4) + d[None, :],
            mask=used[:, None] & (d < VALUE_DIM)[None, :],
            other=0.0,
        )
        largest = tl.maximum(maximum, tl.max(log_mass, 0))
        shares = tl.exp2(log_mass - largest)
        shrink = tl.exp2(maximum - largest)
        total = total * shrink + tl.sum(shares[:, None] * parts, 0)
        mass = mass * shrink + tl.sum(shares, 0)
        maximum = largest
    total = total / tl.where(mass == 0.0, 1.0, mass)
    target = out + tl.program_id(0).to(tl.int64) * VALUE_DIM
    tl.store(target + d, total.to(out.dtype.element_ty), mask=d < VALUE_DIM)
