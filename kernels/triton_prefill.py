"""The prefill kernel: many new tokens a row, over what the row has stored, themselves among it.

A program serves `M` new tokens of one row and one query head. Rows may be of any lengths, begin behind cached tokens,
and have padding anywhere: a token's position is all that counts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_common import LOG2_E, LOWEST, attend_tile, load_ids, load_query, store_part


@triton.jit(do_not_specialize=["q_len", "table_row"])
def prefill_kernel(
    out, query, key_blocks, value_blocks, block_table, positions, sinks, slopes,
    scale, softcap, window, q_len,
    query_row, query_head, query_token, table_row,
    KEY_BLOCK: tl.constexpr, KEY_HEAD: tl.constexpr, KEY_SLOT: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, VALUE_HEAD: tl.constexpr, VALUE_SLOT: tl.constexpr,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr,
    M: tl.constexpr, TILE: tl.constexpr,
    KEY_1: tl.constexpr, KEY_2: tl.constexpr, VALUE_1: tl.constexpr, VALUE_2: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid `(heads, cdiv(q_len, M), rows)`; arguments as of `decode_kernel`."""
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    kv_head = head // GROUP
    tile_m = tl.num_programs(1) - 1 - tl.program_id(1)  # the last tokens see most: they begin first
    row = tl.program_id(2)

    m = tile_m * M + tl.arange(0, M)
    in_m = m < q_len
    position = tl.load(positions + row * q_len + m, mask=in_m, other=-1)
    end = tl.max(position, 0) + 1
    lowest = tl.min(tl.where(position >= 0, position, 2147483647), 0)

    pointers = query + row.to(tl.int64) * query_row + head.to(tl.int64) * query_head + m.to(tl.int64) * query_token
    q1 = load_query(pointers, in_m, 0, KEY_1, KEY_DIM)
    q2 = q1
    if KEY_2 > 0:
        q2 = load_query(pointers, in_m, KEY_1, KEY_2, KEY_DIM)
    slope = tl.zeros([M], tl.float32)
    if ALIBI:
        slope += tl.load(slopes + head).to(tl.float32) * LOG2_E

    maximum = tl.full([M], LOWEST, tl.float32)
    mass = tl.zeros([M], tl.float32)
    if SINKS:
        maximum = tl.zeros([M], tl.float32) + tl.maximum(tl.load(sinks + head).to(tl.float32) * LOG2_E, LOWEST)
        mass += 1.0
    sum1 = tl.zeros([M, VALUE_1], tl.float32)
    sum2 = tl.zeros([M, VALUE_2 if VALUE_2 > 0 else 16], tl.float32)

    first = 0
    if WINDOW:
        first = tl.maximum(tl.minimum(lowest, end) - window + 1, 0)
    start = first // TILE * TILE
    # Before the border every query sees every token, and masks can be left out, which is worth a loop of its own where
    # they are large.
    peel: tl.constexpr = M > 16 and not WINDOW
    border = start
    if peel:
        border = tl.minimum(lowest, end) // TILE * TILE

    # Ids are loaded a turn ahead: one that is loaded in the turn that needs it costs the pipeline a buffer.
    table = block_table + row * table_row
    ids = load_ids(table, start, end, TILE, BLOCK_SIZE)
    if peel:
        for n in tl.range(start, border, TILE):
            next_ids = load_ids(table, n + TILE, end, TILE, BLOCK_SIZE)
            maximum, mass, sum1, sum2 = attend_tile(
                q1, q2, ids, n, first, end, position, slope, kv_head, key_blocks, value_blocks, scale, softcap, window,
                maximum, mass, sum1, sum2,
                KEY_BLOCK, KEY_HEAD, KEY_SLOT, VALUE_BLOCK, VALUE_HEAD, VALUE_SLOT, KEY_DIM, VALUE_DIM, BLOCK_SIZE,
                TILE, KEY_1, KEY_2, VALUE_1, VALUE_2, SOFTCAP, WINDOW, ALIBI, False, True, PRECISION,
            )  # fmt: skip
            ids = next_ids
    for n in tl.range(border, end, TILE):
        next_ids = load_ids(table, n + TILE, end, TILE, BLOCK_SIZE)
        maximum, mass, sum1, sum2 = attend_tile(
            q1, q2, ids, n, first, end, position, slope, kv_head, key_blocks, value_blocks, scale, softcap, window,
            maximum, mass, sum1, sum2,
            KEY_BLOCK, KEY_HEAD, KEY_SLOT, VALUE_BLOCK, VALUE_HEAD, VALUE_SLOT, KEY_DIM, VALUE_DIM, BLOCK_SIZE,
            TILE, KEY_1, KEY_2, VALUE_1, VALUE_2, SOFTCAP, WINDOW, ALIBI, True, True, PRECISION,
        )  # fmt: skip
        ids = next_ids

    # Padding has gone through the unmasked tiles too.
    scaling = tl.where((position >= 0) & (mass != 0.0), 1.0 / mass, 0.0)
    target = out + ((row.to(tl.int64) * q_len + m) * heads + head) * VALUE_DIM
    visible = (position >= 0)[:, None]
    store_part(target, tl.where(visible, sum1 * scaling[:, None], 0.0), in_m, 0, VALUE_1, VALUE_DIM)
    if VALUE_2 > 0:
        store_part(target, tl.where(visible, sum2 * scaling[:, None], 0.0), in_m, VALUE_1, VALUE_2, VALUE_DIM)
