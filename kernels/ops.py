"""Paged attention as an operator of torch, for graphs that torch.compile makes.

In such a graph the kernels are opaque: one operator stores the new tokens of a layer and attends. It is given the
blocks, the block table and the positions as tensors, so that torch knows what is read and written and which addresses
must stay; what the backends keep beside these (strides, addresses, compiled kernels) is found by the address.

Defined through `torch.library.Library`: `custom_op` costs more than twice as much a call.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from hf_paged.plan import GroupPlan
from hf_paged.storage import LayerStorage

from .select import Backend

NAMESPACE = "hf_paged"


class Bound:
    """A layer's blocks with the backend that serves them, as the operator finds them. Whoever binds keeps it alive."""

    __slots__ = ("__weakref__", "backend", "plan", "storage")

    def __init__(self, storage: LayerStorage, backend: Backend, plan: GroupPlan) -> None:
        self.storage, self.backend, self.plan = storage, backend, plan


_bound: weakref.WeakValueDictionary[tuple[int, int], Bound] = weakref.WeakValueDictionary()
"""By the addresses of a layer's blocks and of a step's positions."""


def bind(storage: LayerStorage, backend: Backend, plan: GroupPlan) -> Bound:
    """Let `decode_step` find a layer's storage and a plan when it is given their tensors."""
    bound = Bound(storage, backend, plan)
    _bound[blocks_of(storage)[0].data_ptr(), plan.positions.data_ptr()] = bound
    return bound


def blocks_of(storage: LayerStorage) -> tuple[Tensor, Tensor | None]:
    """The tensors of blocks as `decode_step` takes them: the whole one, or those of keys and of values.

    Two views of the whole one would make torch lose track of what is written.
    """
    return (storage.kv, None) if storage.kv is not None else (storage.key_blocks, storage.value_blocks)


def _decode_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    value_blocks: Tensor | None,
    block_table: Tensor,
    positions: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """Store a step's new tokens of one layer, and attend from them.

    Args:
        query, key, value: `[rows, heads or kv_heads, q_len, dim]`.
        blocks, value_blocks: as `blocks_of` gives them; written to.
        block_table, positions: those of the plan that was bound with the blocks.
        sinks, alibi_slopes, scale, softcap, window: as for a backend's `decode`.

    Returns:
        `[rows, q_len, heads, value_dim]`.

    Raises:
        RuntimeError: the blocks and positions were not bound together.
    """
    bound = _bound.get((blocks.data_ptr(), positions.data_ptr()))
    if bound is None:
        raise RuntimeError(
            "hf_paged::decode_step was given blocks or positions that no cache is using; a compiled graph that was "
            "made with a PagedCache must be called with one"
        )
    storage, backend, plan = bound.storage, bound.backend, bound.plan
    backend.write(storage, key, value, plan)
    return backend.decode(
        query,
        storage,
        plan,
        scale=scale,
        softcap=softcap,
        window=window,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )


def _fake_decode_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    value_blocks: Tensor | None,
    block_table: Tensor,
    positions: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    rows, heads, q_len, _ = query.shape
    return query.new_empty((rows, q_len, heads, value.shape[-1]))


_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(
    "decode_step(Tensor query, Tensor key, Tensor value, Tensor(a!) blocks, Tensor(b!)? value_blocks, "
    "Tensor block_table, Tensor positions, Tensor? sinks, Tensor? alibi_slopes, float scale, float? softcap, "
    "int? window) -> Tensor",
    tags=(torch.Tag.flexible_layout,),  # the kernels take strides
)
_library.impl("decode_step", _decode_step, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::decode_step", _fake_decode_step, lib=_library)

decode_step = torch.ops.hf_paged.decode_step.default
