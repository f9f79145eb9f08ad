"""The kernels that move keys and values: storing a step's new tokens, and copying whole blocks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["q_len", "table_row"])
def write_kernel(
    key, value, key_blocks, value_blocks, block_table, positions, q_len,
    key_row, key_head, key_token, value_row, value_head, value_token, table_row,
    KEY_BLOCK: tl.constexpr, KEY_HEAD: tl.constexpr, KEY_SLOT: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, VALUE_HEAD: tl.constexpr, VALUE_SLOT: tl.constexpr,
    KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Store one new token; grid `(rows * q_len, cdiv(KV_HEADS * the larger dim, WIDTH))`.

    Args:
        key, value: `[rows, KV_HEADS, q_len, dim]` of the strides given, last stride 1.
        key_blocks, value_blocks: `[blocks, KV_HEADS, BLOCK_SIZE, dim]` of the strides given, last stride 1.
        block_table: int32 `[rows, blocks]`.
        positions: int32 `[rows, q_len]`; -1 is not stored.
    """
    query = tl.program_id(0)
    position = tl.load(positions + query)
    if position >= 0:
        row = query // q_len
        token = query % q_len
        block = tl.load(block_table + row * table_row + position // BLOCK_SIZE).to(tl.int64)
        slot = position % BLOCK_SIZE
        element = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)

        head = (element // KEY_DIM).to(tl.int64)
        d = element % KEY_DIM
        source = key + row.to(tl.int64) * key_row + token.to(tl.int64) * key_token + head * key_head + d
        target = key_blocks + block * KEY_BLOCK + slot * KEY_SLOT + head * KEY_HEAD + d
        inside = element < KV_HEADS * KEY_DIM
        tl.store(target, tl.load(source, mask=inside), mask=inside)

        head = (element // VALUE_DIM).to(tl.int64)
        d = element % VALUE_DIM
        source = value + row.to(tl.int64) * value_row + token.to(tl.int64) * value_token + head * value_head + d
        target = value_blocks + block * VALUE_BLOCK + slot * VALUE_SLOT + head * VALUE_HEAD + d
        inside = element < KV_HEADS * VALUE_DIM
        tl.store(target, tl.load(source, mask=inside), mask=inside)


@triton.jit
def copy_kernel(blocks, pairs, STRIDE: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Copy `SIZE` elements from block to block; grid `(pairs, cdiv(SIZE, WIDTH))`.

    Args:
        blocks: `[blocks, ...]`, each contiguous, `STRIDE` apart.
        pairs: int32 `[pairs, 2]`: source and destination.
    """
    source = tl.load(pairs + 2 * tl.program_id(0)).to(tl.int64) * STRIDE
    target = tl.load(pairs + 2 * tl.program_id(0) + 1).to(tl.int64) * STRIDE
    element = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = element < SIZE
    tl.store(blocks + target + element, tl.load(blocks + source + element, mask=inside), mask=inside)
