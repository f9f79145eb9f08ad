"""The physical blocks of one layer."""

from __future__ import annotations

from typing import Any

import torch


class LayerStorage:
    """The key and value blocks of one layer.

    Where keys and values agree in width and dtype they live in one tensor
    `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, so that a block is one stretch of memory; otherwise in two
    tensors `[num_blocks, num_kv_heads, block_size, head_dim]` under the same block ids. Kernels see both forms
    through the same two views.

    Attributes:
        key_blocks: `[num_blocks, num_kv_heads, block_size, key_dim]`; the last stride is 1, the others are free.
        value_blocks: `[num_blocks, num_kv_heads, block_size, value_dim]`, likewise.
        kv: the single tensor when there is one, else None.
        native: a backend may keep here what it derives from the tensors (addresses, strides).
    """

    __slots__ = ("key_blocks", "value_blocks", "kv", "block_size", "native", "__weakref__")

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        key_dtype: torch.dtype,
        value_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.native: Any = None
        # A tensor made under inference mode could not be written outside it.
        with torch.inference_mode(False):
            if key_dim == value_dim and key_dtype == value_dtype:
                self.kv = torch.empty(
                    (num_blocks, 2, num_kv_heads, block_size, key_dim), dtype=key_dtype, device=device
                )
                self.key_blocks, self.value_blocks = self.kv[:, 0], self.kv[:, 1]
            else:
                self.kv = None
                shape = (num_blocks, num_kv_heads, block_size)
                self.key_blocks = torch.empty((*shape, key_dim), dtype=key_dtype, device=device)
                self.value_blocks = torch.empty((*shape, value_dim), dtype=value_dtype, device=device)

    @property
    def device(self) -> torch.device:
        return self.key_blocks.device

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes in this layer, keys and values together."""
        return sum(t[0].numel() * t.element_size() for t in (self.key_blocks, self.value_blocks))
