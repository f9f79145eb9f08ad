"""What the Triton attention kernels share: reading a tile of tokens through the block table, and the softmax over it.

Names: `m` counts the rows of a product (queries), `n` is a position in the row of the batch, `d` counts the head dim,
which is cut into two powers of two where it is none itself (112 = 64 + 48 of 64). Scores are in units of log 2, since
the hardware has exp2.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Below every score that is finite. Not -inf, whose difference with itself is NaN: so a query that sees nothing needs no
# care.
LOWEST = tl.constexpr(-3.0e38)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_ids(table, n, stop, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The physical block of each token of the tile at `n`, or the one of all where blocks are as large as tiles.

    Past the end it is block 0: entries there are undefined, and whatever is read through them is masked.
    """
    if BLOCK_SIZE >= TILE:
        ids = tl.load(table + n // BLOCK_SIZE, mask=n < stop, other=0)
    else:
        place = n + tl.arange(0, TILE)
        ids = tl.load(table + place // BLOCK_SIZE, mask=place < stop, other=0)
    return ids


@triton.jit
def tile_offsets(
    ids, n, kv_head, STRIDE_BLOCK: tl.constexpr, STRIDE_HEAD: tl.constexpr, STRIDE_SLOT: tl.constexpr,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """`[TILE]`: where each token's vector begins, in elements of the pool, which may have more than 2^31 of them.

    Strides are constants, so that the compiler knows what they are multiples of: it loads 16 bytes at a time only then.
    """
    slot = tl.arange(0, TILE)
    if STRIDE_HEAD < 8388608:  # of 256 heads none is 2^31 elements away: 32 bits do, and fewer registers
        base = ids.to(tl.int64) * STRIDE_BLOCK + kv_head * STRIDE_HEAD
    else:
        base = ids.to(tl.int64) * STRIDE_BLOCK + kv_head.to(tl.int64) * STRIDE_HEAD
    if BLOCK_SIZE >= TILE:
        base += (n % BLOCK_SIZE) * STRIDE_SLOT
    else:
        slot = slot % BLOCK_SIZE  # tiles begin at block borders
    return base + slot * STRIDE_SLOT


@triton.jit
def load_part(blocks, offsets, valid, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, MASK: tl.constexpr):
    """`[TILE, WIDTH]`: a tile's vectors from dim `FIRST` on; zeros beyond `DIM`, and with `MASK` where not `valid`."""
    d = FIRST + tl.arange(0, WIDTH)
    pointers = blocks + offsets[:, None] + d[None, :]
    if FIRST + WIDTH > DIM:
        if MASK:
            part = tl.load(pointers, mask=valid[:, None] & (d < DIM)[None, :], other=0.0)
        else:
            part = tl.load(pointers, mask=(d < DIM)[None, :], other=0.0)
    elif MASK:
        part = tl.load(pointers, mask=valid[:, None], other=0.0)
    else:
        part = tl.load(pointers)
    return part


@triton.jit
def load_query(pointers, in_m, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """`[M, WIDTH]`: the queries at `pointers` `[M]` from dim `FIRST` on; zeros where there is none."""
    d = FIRST + tl.arange(0, WIDTH)
    mask = in_m[:, None]
    if FIRST + WIDTH > DIM:
        mask = mask & (d < DIM)[None, :]
    return tl.load(pointers[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_part(pointers, part, in_m, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Store `part` `[M, WIDTH]` from dim `FIRST` on at `pointers` `[M]`."""
    d = FIRST + tl.arange(0, WIDTH)
    mask = in_m[:, None]
    if FIRST + WIDTH > DIM:
        mask = mask & (d < DIM)[None, :]
    tl.store(pointers[:, None] + d[None, :], part.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def attend_tile(
    q1, q2, ids, n, first, stop, position, slope, kv_head, key_blocks, value_blocks, scale, softcap, window,
    maximum, mass, sum1, sum2,
    KEY_BLOCK: tl.constexpr, KEY_HEAD: tl.constexpr, KEY_SLOT: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, VALUE_HEAD: tl.constexpr, VALUE_SLOT: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    KEY_1: tl.constexpr, KEY_2: tl.constexpr, VALUE_1: tl.constexpr, VALUE_2: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one tile of tokens into the online softmax `(maximum, mass, sum1, sum2)` of `M` queries.

    `MASK`: the tile may hold positions outside `[first, stop)`. `CAUSAL`: the queries have positions of their own,
    `position` `[M]`; otherwise they share one, a scalar, and `stop` is the position after it.
    """
    place = n + tl.arange(0, TILE)
    valid = place < stop
    if WINDOW:
        valid = valid & (place >= first)

    offsets = tile_offsets(ids, n, kv_head, KEY_BLOCK, KEY_HEAD, KEY_SLOT, TILE, BLOCK_SIZE)
    k1 = load_part(key_blocks, offsets, valid, 0, KEY_1, KEY_DIM, False)
    scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
    if KEY_2 > 0:
        k2 = load_part(key_blocks, offsets, valid, KEY_1, KEY_2, KEY_DIM, False)
        scores = tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION)
    scores *= scale
    if SOFTCAP:  # softcap * tanh(scores)
        scores = softcap - 2.0 * softcap / (tl.exp2(scores * (2.0 * LOG2_E)) + 1.0)
    if CAUSAL:
        if ALIBI:
            scores += slope[:, None] * (place[None, :] - position[:, None]).to(tl.float32)
        if MASK:
            seen = valid[None, :] & (place[None, :] <= position[:, None])
            if WINDOW:
                seen = seen & (place[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
    else:
        if ALIBI:
            scores += slope[:, None] * (place - position).to(tl.float32)[None, :]
        if MASK:
            scores = tl.where(valid[None, :], scores, float("-inf"))

    largest = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.exp2(scores - largest[:, None])
    shrink = tl.exp2(maximum - largest)
    mass = mass * shrink + tl.sum(weights, 1)
    weights = weights.to(value_blocks.dtype.element_ty)

    # Masked, for unused slots may hold NaN, and a weight of zero times NaN is NaN.
    offsets = tile_offsets(ids, n, kv_head, VALUE_BLOCK, VALUE_HEAD, VALUE_SLOT, TILE, BLOCK_SIZE)
    v1 = load_part(value_blocks, offsets, valid, 0, VALUE_1, VALUE_DIM, MASK)
    sum1 = tl.dot(weights, v1, sum1 * shrink[:, None], input_precision=PRECISION)
    if VALUE_2 > 0:
        v2 = load_part(value_blocks, offsets, valid, VALUE_1, VALUE_2, VALUE_DIM, MASK)
        sum2 = tl.dot(weights, v2, sum2 * shrink[:, None], input_precision=PRECISION)
    return largest, mass, sum1, sum2
