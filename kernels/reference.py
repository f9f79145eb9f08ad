"""Paged attention in plain torch: the executable specification of every backend.

A row's keys and values do not lie together: its `i`-th token is in block `block_table[row, i // block_size]`, slot
`i % block_size` (PagedAttention, arXiv 2309.06180). Everything here is that look-up followed by ordinary attention.
It runs on any device and with any floating dtype, accumulates in float32 (float64 for float64 inputs), and does
nothing to be fast; `cpu` and the Triton kernels are tested against it.

Shapes: `rows` is the batch, `q_len` the new tokens a row has in this step, `heads` the query heads and `kv_heads` the
key/value heads; query heads `g * kv_head` to `g * kv_head + g - 1`, with `g = heads // kv_heads`, share one KV head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_paged.plan import GroupPlan
from hf_paged.storage import LayerStorage

name = "reference"


def unsupported(query_dtype: torch.dtype, storage: LayerStorage) -> str | None:
    """Why this backend cannot serve these dtypes on this device, or None: the reference serves all floating dtypes."""
    for dtype in (query_dtype, storage.key_blocks.dtype, storage.value_blocks.dtype):
        if not dtype.is_floating_point:
            return f"the reference kernels need floating-point tensors, got {dtype}"
    return None


def serves_graphs(device: torch.device) -> bool:
    """Whether a step may be part of a graph that torch compiles: it asks for lengths, as no CUDA graph can."""
    return device.type == "cpu"


def graph_key() -> object:
    """What a CUDA graph that was captured now would go on with, besides its tensors."""
    return None


@torch.no_grad()
def write(storage: LayerStorage, key: Tensor, value: Tensor, plan: GroupPlan) -> None:
    """Store the new tokens of a step.

    Args:
        key: `[rows, kv_heads, q_len, key_dim]`, any strides.
        value: `[rows, kv_heads, q_len, value_dim]`, any strides.
        plan: token `(b, i)` goes to position `plan.positions[b, i]` of row `b`; -1 is not stored.
    """
    row, token = torch.nonzero(plan.positions >= 0, as_tuple=True)  # [stored], [stored]
    position = plan.positions[row, token].long()
    block = plan.block_table[row, position // storage.block_size].long()
    slot = position % storage.block_size
    storage.key_blocks[block, :, slot] = key[row, :, token]  # [stored, kv_heads, key_dim]
    storage.value_blocks[block, :, slot] = value[row, :, token]


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
) -> Tensor:
    """Attention of one new token a row, or a few, over the row's stored tokens, themselves among them.

    Args:
        query: `[rows, heads, q_len, key_dim]`, any strides.
        scale: multiplies the scores.
        softcap: if given, a score `s` becomes `softcap * tanh(s / softcap)`.
        window: if given, only the last `window` stored tokens are seen.
        sinks: `[heads]`, if given, one more logit a head that joins the softmax and carries no value.
        alibi_slopes: `[heads]`, if given, what a score loses for each token between query and key (arXiv 2108.12409).

    Returns:
        `[rows, q_len, heads, value_dim]`, contiguous, in the query's dtype; zeros where the position is -1.
    """
    rows, heads, q_len, _ = query.shape
    if q_len > 1:
        options = {"softcap": softcap, "window": window, "sinks": sinks, "alibi_slopes": alibi_slopes}
        return prefill(query, query, query, storage, plan, scale=scale, **options)  # it looks keys and values up
    out = query.new_zeros(rows, 1, heads, storage.value_blocks.shape[-1])
    for row, length in enumerate(plan.context_lens.tolist()):
        if length and plan.positions[row, 0] >= 0:
            start = window_start(length - 1, window)
            key, value = gather(storage, plan.block_table[row], length, start)
            last = torch.tensor([length - 1 - start], device=query.device)
            out[row] = attend(query[row], key, value, last, scale, softcap, window, sinks, alibi_slopes)
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
) -> Tensor:
    """Causal attention of a step's new tokens over what their rows have stored, the new tokens among it.

    Args:
        query: `[rows, heads, q_len, key_dim]`, any strides.
        key, value: this step's `[rows, kv_heads, q_len, dim]`, already in their blocks; a backend that would rather
            not look them up there may read them from here. The reference looks them up.
        scale, softcap, window, sinks, alibi_slopes: as for `decode`.

    Returns:
        `[rows, q_len, heads, value_dim]`; a token at position `p` has seen positions `(p - window, p]`. Zeros where
        the position is -1.
    """
    rows, heads, q_len, _ = query.shape
    out = query.new_zeros(rows, q_len, heads, storage.value_blocks.shape[-1])
    for row, length in enumerate(plan.context_lens.tolist()):
        real = torch.nonzero(plan.positions[row] >= 0).flatten()  # [tokens]: there may be pads between them
        if length and len(real):
            positions = plan.positions[row, real]
            start = window_start(int(positions[0]), window)
            past_and_new = gather(storage, plan.block_table[row], length, start)
            positions = positions - start
            out[row, real] = attend(
                query[row, :, real], *past_and_new, positions, scale, softcap, window, sinks, alibi_slopes
            )
    return out


@torch.no_grad()
def copy_blocks(storage: LayerStorage, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks, `(source, destination)` each; no destination is also a source."""
    if pairs:
        source, destination = torch.tensor(pairs, device=storage.device).T
        storage.key_blocks[destination] = storage.key_blocks[source]
        storage.value_blocks[destination] = storage.value_blocks[source]


def window_start(position: int, window: int | None) -> int:
    """The first token that a query at `position` sees. The blocks of those before may be others' already."""
    return 0 if window is None else max(0, position - window + 1)


def gather(storage: LayerStorage, table: Tensor, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
    """The tokens of one row from `start` up to `length`, laid side by side.

    Args:
        table: `[max_blocks]`, the row of the block table.

    Returns:
        Keys `[kv_heads, length - start, key_dim]` and values `[kv_heads, length - start, value_dim]`.
    """
    size = storage.block_size
    used = table[start // size : -(-length // size)].long()  # [blocks]
    skip, count = start % size, length - start

    def dense(blocks: Tensor) -> Tensor:
        picked = blocks[used].transpose(0, 1)  # [kv_heads, blocks, block_size, dim]
        # The last block's unused slots hold anything, NaN too: cut them off.
        return picked.flatten(1, 2)[:, skip : skip + count]

    return dense(storage.key_blocks), dense(storage.value_blocks)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Attention of one row's queries, at the given positions, over the row's dense keys and values.

    Args:
        query: `[heads, tokens, key_dim]`.
        key, value: `[kv_heads, length, dim]`.
        positions: `[tokens]`.

    Returns:
        `[tokens, heads, value_dim]` in the query's dtype.
    """
    heads, tokens, _ = query.shape
    kv_heads, length, _ = key.shape
    wide = torch.float32
    for tensor in (query, key, value):
        wide = torch.promote_types(wide, tensor.dtype)

    grouped = query.to(wide).reshape(kv_heads, heads // kv_heads, tokens, -1)
    scores = torch.einsum("kgtd,kld->kgtl", grouped, key.to(wide)) * scale
    scores = scores.reshape(heads, tokens, length)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)

    place = torch.arange(length, device=query.device)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(wide)[:, None, None] * (positions[:, None] - place)
    seen = place <= positions[:, None]  # [tokens, length]
    if window is not None:
        seen &= place > positions[:, None] - window
    scores = scores.masked_fill(~seen, float("-inf"))

    if sinks is not None:
        sink_logits = sinks.to(wide)[:, None, None].expand(heads, tokens, 1)
        scores = torch.cat([scores, sink_logits], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :length]  # with a sink the rest of the mass is dropped
    weights = weights.reshape(kv_heads, heads // kv_heads, tokens, length)
    out = torch.einsum("kgtl,kld->tkgd", weights, value.to(wide))
    return out.reshape(tokens, heads, -1).to(query.dtype)
