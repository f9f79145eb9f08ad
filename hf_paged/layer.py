"""One layer's view of the pool, and what it hands over to the attention function."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from hf_paged.allocator import Growth
from hf_paged.kernels import select
from hf_paged.plan import StepPlan
from hf_paged.pool import BlockPool
from hf_paged.rows import Rows
from hf_paged.storage import LayerStorage

HANDLE = "_hf_paged_handle"
"""Attribute under which `PagedLayer.update` leaves a `Handle` on the tensors that it returns."""


class Handle:
    """What `PagedLayer.update` leaves on the key and the value it returns, for the attention function.

    The attention function is not given the cache. It finds it here, on the very tensors: a model that changes keys or
    values after the update hands over other tensors, without a handle. The layer is held weakly, so that a tensor that
    somebody keeps does not keep the pool.

    Attributes:
        layer: weak reference to the layer.
        step: the plan that the update belonged to.
        key, value: the new tokens, `[rows, kv_heads, q_len, dim]`.
        is_placeholder: the tensors it stands on have the shape of all positions, and nothing but NaN in them.
    """

    __slots__ = ("is_placeholder", "key", "layer", "step", "value")

    def __init__(
        self,
        layer: weakref.ref[PagedLayer],
        step: StepPlan,
        key: torch.Tensor,
        value: torch.Tensor,
        is_placeholder: bool,
    ) -> None:
        self.layer, self.step, self.key, self.value = layer, step, key, value
        self.is_placeholder = is_placeholder


class PagedLayer(CacheLayerMixin):
    """One layer's view of the pool. All state of rows is in `Rows`, which the layers of a cache share."""

    is_compileable = False
    is_croppable = True

    def __init__(self, rows: Rows, index: int, group: int) -> None:
        # The base class would set `keys` and `values`, which are read from the blocks here.
        self.rows = rows
        self.index = index
        self.group = group
        self.kind = rows.pool.groups[group].kind
        self.window = rows.pool.groups[group].window
        self.is_sliding = self.kind != "full_attention"
        self.storage: LayerStorage | None = None
        self._nan: tuple[torch.Tensor, ...] = ()
        self.backend: select.Backend | None = None
        self.hands_over = rows.pool.hands_over.get(index)
        """Whether the model passes what `update` returns unchanged to the attention function; None until seen."""
        self.record_past = False
        self._ref = weakref.ref(self)

    @property
    def is_initialized(self) -> bool:
        return self.storage is not None

    @property
    def device(self) -> torch.device | None:
        return None if self.storage is None else self.storage.device

    @property
    def keys(self) -> torch.Tensor | None:
        """`[rows, kv_heads, padded length, key_dim]`, gathered from the blocks; zeros where nothing is stored,
        or where a sliding window has left the tokens behind."""
        return None if self.storage is None or not self.rows.num_rows else self.gather()[0]

    @property
    def values(self) -> torch.Tensor | None:
        """`[rows, kv_heads, padded length, value_dim]`, gathered likewise."""
        return None if self.storage is None or not self.rows.num_rows else self.gather()[1]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Find the layer's blocks in the pool, which makes them if this is the first cache to ask."""
        self.storage = self.rows.pool.storage(self.index, key_states, value_states)
        self.backend = select.backend_for(self.storage.device, key_states.dtype, self.storage)
        with torch.inference_mode(False):
            self._nan = tuple(t.detach().new_full((), float("nan")) for t in (key_states, value_states))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens.

        Args:
            key_states: `[rows, kv_heads, q_len, key_dim]`
            value_states: `[rows, kv_heads, q_len, value_dim]`

        Returns:
            Keys and values of all positions, dense, in padded order. Where the attention function will read the blocks
            itself, only their shape: NaN that takes no memory.

        Raises:
            OutOfBlocksError: the pool is full; nothing has changed.
            ValueError: other rows, heads, widths, dtype or device than the cache holds.
            RuntimeError: the forward pass before this one stopped half-way; it has been undone.
        """
        try:
            return self._update(key_states, value_states, **kwargs)
        except BaseException:
            # A step that this layer has written is the one before, which is complete.
            rows = self.rows
            rows.state_lost = rows.has_state
            if rows.step is not None and rows.lengths[self.index] != rows.step.end:
                rows.undo_open()
            raise

    def _update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, index = self.rows, self.index
        if (kwargs.get("kwargs") or {}).get("use_cache") is False and _was_told_not_to_cache(rows, index):
            raise ValueError("use_cache=False was passed together with a cache; leave out one of them")
        key, value = key_states.detach(), value_states.detach()
        # Checked before anything is allocated, so that a wrong model changes nothing.
        self.lazy_initialization(key, value) if self.storage is None else self._check(key, value)
        num_rows, _, q_len, _ = key.shape
        rows.check_read()
        step, held = rows.step, rows.lengths[index]
        if step is None or step.closed or held == step.end:
            step = rows.begin(num_rows, q_len, None, sees_mask=False)
        elif held == step.start and (q_len != step.q_len or num_rows != len(step.context_lens)):
            raise ValueError(
                f"layer {index} got {num_rows} rows of {q_len} tokens in a forward pass whose mask was made for "
                f"{len(step.context_lens)} rows of {step.q_len}"
            )
        if held != step.start:
            rows.undo_interrupted_first(index)
            raise RuntimeError(
                f"layer {index} holds {held} positions where the layers before it hold {step.start}: a forward pass "
                "stopped half-way, or a model with other layers used this cache. The step was not stored; use "
                "cache.reset()"
            )
        if not step.allocated:
            allocate(rows, step)
        plan = step.on(self.group, key.device)
        self.backend.write(self.storage, key, value, plan)
        rows.lengths[index] = step.end

        if key_states.requires_grad or value_states.requires_grad:
            key_states, value_states = _NoBackward.apply(key_states, value_states)
        # A model may look at the shape of what it gets (relative position biases do), so a placeholder has the full
        # one; whoever looks at its values gets NaN instead of something that is silently wrong.
        is_placeholder = (
            bool(self.hands_over)
            and not step.was_empty
            and not rows.always_dense
            and not step.must_be_dense
            and self.group in step.plain_groups
        )
        if is_placeholder or self.group in step.unmasked_groups:
            rows.unread = self._ref  # other keys would be attended to without the mask that was left to us
        if is_placeholder:
            nan_key, nan_value = self._nan
            keys = nan_key.expand(num_rows, key.shape[1], step.end, key.shape[3])
            values = nan_value.expand(num_rows, value.shape[1], step.end, value.shape[3])
        elif step.was_empty:
            keys, values = key_states, value_states
        else:
            # A mask that we did not make covers what `get_mask_sizes` told.
            first = 0 if step.sees_mask else self._outside_window(step.start)
            keys, values = _join_graph(self.gather(first), key_states, value_states)
        handle = Handle(self._ref, step, key_states, value_states, is_placeholder)
        setattr(keys, HANDLE, handle)
        setattr(values, HANDLE, handle)
        return keys, values

    def gather(self, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all padded positions from `first` on, `[rows, kv_heads, length, dim]`, zeros where none is
        stored."""
        blocks, offsets, holes = self.rows.dense_index(self.group, self.storage.device)
        if first:
            blocks, offsets = blocks[:, first:], offsets[:, first:]
            holes = None if holes is None else holes[:, first:]
        dense = []
        for source in (self.storage.key_blocks, self.storage.value_blocks):
            heads = torch.arange(source.shape[1], device=source.device)
            # Contiguous, as other caches give it: some models view() what they get.
            out = source[blocks[:, None], heads[:, None], offsets[:, None]]  # [rows, kv_heads, length, dim]
            if holes is not None:
                out.masked_fill_(holes[:, None, :, None], 0)
            dense.append(out)
        return dense[0], dense[1]

    def _check(self, key: torch.Tensor, value: torch.Tensor) -> None:
        storage = self.storage
        keys, values = storage.key_blocks, storage.value_blocks
        if (
            key.dtype != keys.dtype
            or value.dtype != values.dtype
            or key.shape[1] != keys.shape[1]
            or key.shape[3] != keys.shape[3]
            or value.shape[3] != values.shape[3]
            or key.device != keys.device
        ):
            self.rows.pool.storage(self.index, key, value)  # says what is wrong

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask must cover where it is not made by our mask function, which covers
        all. Of windowed layers these are the positions that other caches keep: the masks of some models (Moshi) know no
        window, and rely on that."""
        length = self.get_seq_length()
        first = self._outside_window(length)
        return length - first + query_length, first

    def _outside_window(self, length: int) -> int:
        """Positions at the beginning that no later query sees."""
        return 0 if self.window is None else max(length - self.window + 1, 0)

    def get_seq_length(self) -> int:
        """Padded length: what transformers slices input ids by. Tokens stored are in `PagedCache.stats()`."""
        return self.rows.lengths[self.index]

    def get_max_length(self) -> int:
        """-1, for no maximum; the window of windowed layers."""
        return self.window if self.window is not None else -1

    def activate_past_recording(self) -> None:
        """Nothing is dropped that a rollback would need."""
        self.record_past = True

    def _whole_cache(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the layers of a PagedCache share their rows; call this on the cache")

    reset = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _whole_cache
    offload = prefetch = _whole_cache

    def __deepcopy__(self, memo: dict) -> PagedLayer:
        raise NotImplementedError(
            "the layers of a PagedCache share their rows; copy the whole cache. A model that adds copies of layers to "
            "the cache it is given needs transformers' own cache"
        )


def _was_told_not_to_cache(rows: Rows, index: int) -> bool:
    """Whether the `use_cache=False` that an attention module passes on is the caller's. Decoder layers of some models
    (Olmo 3, Qwen3-VL) have it as a default of their own, which says nothing: the outermost forward pass knows.

    Its arguments are read from its frame, since nothing else tells them: a model that is not enabled has no hook of
    ours, and transformers (5.24; 5.17 tells `update` nothing at all) keeps them nowhere else while the pass runs.
    """
    step = rows.step
    if step is not None and not step.closed and step.end in rows.lengths and rows.lengths[index] != step.end:
        return False  # not the first layer of its pass, which was asked about
    outermost: dict[str, Any] | None = None
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("self"), PreTrainedModel):
            outermost = frame.f_locals
        frame = frame.f_back
    if outermost is None:
        return True
    passed = outermost.get("kwargs")
    told = outermost.get("use_cache", passed.get("use_cache") if isinstance(passed, dict) else None)
    return told is False or (told is None and getattr(outermost["self"].config, "use_cache", True) is False)


def allocate(rows: Rows, step: StepPlan) -> None:
    """Find a step's blocks and copy those that were shared, or leave everything as it was."""
    pool = rows.pool
    with pool.lock:  # until the copies are made, nobody else may write to or free what is copied
        rows.allocate(step)
        try:
            for group, growth in enumerate(step.growths):
                copy_shared(pool, group, growth)
        except BaseException:
            rows.undo()
            raise
    if pool.recordings:
        _tell_recordings(rows, step)


def _tell_recordings(rows: Rows, step: StepPlan) -> None:
    try:
        for recording in rows.pool.recordings:
            recording.note_step(rows, step)
    except BaseException:  # whoever is told of steps may refuse one
        rows.undo()
        raise


def copy_shared(pool: BlockPool, group: int, growth: Growth) -> None:
    """Copy, in all layers of a group, the blocks that a growth replaced because others hold them too."""
    if growth.copies:
        for layer in pool.groups[group].layers:
            if (storage := pool.storages.get(layer)) is not None:
                backend = select.backend_for(storage.device, storage.key_blocks.dtype, storage)
                backend.copy_blocks(storage, growth.copies)


class _NoBackward(torch.autograd.Function):
    """Lets a forward pass with gradients enabled through, and refuses the backward pass: the blocks hold values, not
    the graph that made them."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError(
            "a backward pass cannot go through a PagedCache, whose blocks hold values without their graph. Train "
            "without a cache (use_cache=False), or run this forward pass under torch.no_grad()"
        )


def _join_graph(
    dense: tuple[torch.Tensor, torch.Tensor], key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if not (key.requires_grad or value.requires_grad):
        return dense
    keys, values, _, _ = _NoBackward.apply(*dense, key, value)
    return keys, values
