"""The plan of one forward pass: which rows, which slots, which lengths.

It is made once on the host before the first layer runs and read by every layer and kernel, so that nothing that
depends on lengths is worked out per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hf_paged.allocator import Growth


@dataclass(slots=True)
class GroupPlan:
    """What the kernels need to know of one group of layers (layers that share block tables) for one step.

    All tensors are int32, contiguous, and on the device of the group's layers. In every shape, `rows` is the batch.
    """

    block_table: torch.Tensor
    """`[rows, max_blocks]`: physical block of each logical block; entries past a row's last block are undefined."""
    context_lens: torch.Tensor
    """`[rows]`: tokens stored in each row once this step has written its own; 0 for an empty row."""
    positions: torch.Tensor
    """`[rows, q_len]`: the place of each new token in its row, counted in stored tokens; -1 where nothing is stored
    (padding, a finished row)."""
    max_context: int
    """The largest entry of `context_lens`."""
    native: Any = field(default=None, repr=False)
    """A backend may keep here what it derives from the tensors above, for the life of the plan."""
    is_static: bool = False
    """The tensors keep their places and are filled anew for every step, maybe for launches that a CUDA graph replays.
    On a GPU `max_context` is then what the block table has room for."""


@dataclass(slots=True, eq=False)
class StepPlan:
    """One forward pass over the rows of a cache. `Rows.begin` makes it, `Rows.allocate` finds it the blocks.

    Two lengths are told apart: the padded length, in which all rows are equal and which transformers counts in, and
    the stored length of each row, in which padding does not exist.
    """

    start: int
    """Padded length before the step."""
    q_len: int
    """New positions per row, padding included."""
    sees_mask: bool
    """Whether the padding mask of this step is known, which it is when a model is enabled."""
    was_empty: bool
    """The rows had no positions before the step."""
    new_tokens: np.ndarray | None
    """`[rows, q_len]` bool: which new positions are stored; None for all of them."""
    positions: np.ndarray
    """`[rows, q_len]` int32, as in `GroupPlan`."""
    context_lens: np.ndarray
    """`[rows]` int32, as in `GroupPlan`."""
    must_be_dense: bool = False
    """The mask hides tokens that are stored, which no kernel expresses."""
    mask: np.ndarray | None = None
    """`[rows, >= start + q_len]` bool: the padding mask, where known and not None."""
    plain_groups: set[int] = field(default_factory=set)
    """Groups whose mask says no more than causal order, the group's window and the padding."""
    other_masks: list[torch.Tensor] = field(default_factory=list)
    """Masks that were made and say more."""
    masks: dict[int, torch.Tensor | None] = field(default_factory=dict)
    """Per group: the mask handed to the model last."""
    build_mask: dict[int, Callable[[], torch.Tensor | None]] = field(default_factory=dict)
    """Per group that was handed None: makes the mask after all, for the dense way."""
    unmasked_groups: set[int] = field(default_factory=set)
    """Groups whose mask was left to the kernel, without looking whether there is one."""
    allocated: bool = False
    in_graph: bool = False
    """A compiled graph runs it."""
    closed: bool = False
    """The forward pass that this plan belongs to has ended well."""
    growths: list[Growth] = field(default_factory=list)
    block_tables: list[np.ndarray] = field(default_factory=list)
    table_stamps: list[int] = field(default_factory=list)
    """Per group: a number that no other contents of a block table have."""
    before: dict[str, Any] = field(default_factory=dict)
    """The rows' state before the step, for undoing it."""
    dense_index: dict[tuple[int, torch.device], Any] = field(default_factory=dict)
    """Kept by `Rows.dense_index`."""
    _on_device: dict[tuple[int, torch.device], GroupPlan] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Padded length after the step."""
        return self.start + self.q_len

    def on(self, group: int, device: torch.device) -> GroupPlan:
        """The group's plan as tensors on `device`; on a CPU they share the host's memory."""
        plan = self._on_device.get((group, device))
        if plan is None:
            arrays = (self.block_tables[group], self.context_lens, self.positions)
            tensors = [torch.from_numpy(array) for array in arrays]
            if device.type != "cpu":
                tensors = send_together(tensors, device)
            longest = int(self.context_lens.max(initial=0))
            plan = self._on_device[group, device] = GroupPlan(*tensors, max_context=longest)
        return plan

    def forget_masks(self) -> None:
        """Drop what only the forward pass itself needed."""
        self.masks.clear()
        self.build_mask.clear()
        self.unmasked_groups.clear()
        self.other_masks.clear()
        self.dense_index.clear()


def send_together(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy int32 tensors to a device in one piece, which the host need not wait for.

    Each begins at a multiple of 16 bytes, as kernels like it. Pinned memory comes from torch's allocator for it, which
    gives it to nobody else before the copy is done.
    """
    starts, size = [], 0
    for tensor in tensors:
        starts.append(size)
        size += -(-tensor.numel() // 4) * 4
    with torch.inference_mode(False):
        staged = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        for start, tensor in zip(starts, tensors, strict=True):
            staged[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
        sent = staged.to(device, non_blocking=True)
        return [
            sent[start : start + tensor.numel()].view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]
