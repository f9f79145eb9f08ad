"""What one request takes: the arithmetic, for a model whose figures are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

LARGEST_POOL = 2**31 - 1  # tokens: kernels count slots in 32 bits


@dataclass(frozen=True)
class GroupFootprint:
    """Layers that share block tables, as `LayerGroup`.

    Attributes:
        kind: as in transformers' `layer_types`, such as `full_attention`.
        window: tokens that a query sees, itself included, or the chunk size; None for full attention.
        layers: how many there are.
        bytes_per_token: of keys and values over all of them.
    """

    kind: str
    window: int | None
    layers: int
    bytes_per_token: int

    @property
    def name(self) -> str:
        return self.kind if self.window is None else f"{self.kind}({self.window})"

    @property
    def frees_blocks(self) -> bool:
        """Whether blocks that have left the window are freed."""
        return self.kind == "sliding_attention" and self.window is not None

    def peak_blocks(self, length: Any, block_size: int) -> Any:
        """The most blocks that a row holds while it grows to `length` tokens, one at a time; numbers or arrays.

        Blocks that have left a sliding window are freed; a window may begin and end within a block.
        """
        blocks = -(-length // block_size)
        if self.window is None or not self.frees_blocks:
            return blocks
        return np.minimum(blocks, -(-(self.window + block_size - 1) // block_size))

    def kept_tokens(self, length: Any) -> Any:
        """Tokens of a row of `length` that later tokens can see; numbers or arrays."""
        return length if self.window is None else np.minimum(length, self.window)


@dataclass(frozen=True)
class Footprint:
    """What a model's keys, values and states take.

    Attributes:
        groups: the layers with attention. Layers that read another layer's keys and values are in none.
        state_bytes: of recurrent layers, for each request, however long it is.
        first_layer_bytes: of keys and values a token in the first layer that stores some; a pool divides a budget as
            if all were as large.
        model: what to call it.
        dtype: of keys and values; None where it is not known.
        parameters: of the model; None where it is not known, as where its text part alone could be run.
        weight_bytes: these in `dtype`, buffers included.
        is_quantized: the checkpoint's weights are in another form, and `weight_bytes` are not theirs.
        max_positions: what the config gives as the longest sequence.
    """

    groups: tuple[GroupFootprint, ...]
    state_bytes: int = 0
    first_layer_bytes: int | None = None
    model: str | None = None
    dtype: str | None = None
    parameters: int | None = None
    weight_bytes: int | None = None
    is_quantized: bool = False
    max_positions: int | None = None

    @classmethod
    def per_token(cls, nbytes: int) -> Footprint:
        """Of a model of which only the bytes a token are known; every layer is taken to have full attention.

        Raises:
            ValueError: `nbytes` is not positive.
        """
        if nbytes < 1:
            raise ValueError(f"the bytes of a token must be positive, not {nbytes}")
        return cls((GroupFootprint("full_attention", None, 1, nbytes),))

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token takes in all layers, before any has left a window."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def num_layers(self) -> int:
        """Layers that store keys and values."""
        return sum(group.layers for group in self.groups)

    def token_bytes(self, length: Any) -> Any:
        """Bytes that a row of `length` tokens cannot do without: what later tokens see, and the state; numbers or
        arrays."""
        found = self.state_bytes + sum(group.bytes_per_token * group.kept_tokens(length) for group in self.groups)
        return found if isinstance(length, np.ndarray) else int(found)

    def contiguous_bytes(self, max_length: int) -> int:
        """Bytes that are reserved for a row which may become `max_length` tokens long, as a `StaticCache` does:
        windowed layers reserve their window."""
        return self.token_bytes(max_length)

    def pool_blocks(self, length: Any, block_size: int) -> Any:
        """Blocks that a pool must have for a row that grows to `length` tokens; numbers or arrays.

        Every group of layers has as many blocks as the others, so the one that holds most counts.
        """
        peaks = [group.peak_blocks(length, block_size) for group in self.groups]
        return np.maximum.reduce(peaks) if isinstance(length, np.ndarray) else int(max(peaks))

    def summed_blocks(self, length: np.ndarray, block_size: int) -> np.ndarray:
        """`pool_blocks` of every length from 1 to `length` together, as floats: what a row holds over its steps."""
        most = self.pool_blocks(LARGEST_POOL, block_size)  # where all layers have windows, no row holds more
        growing = np.minimum(length, most * block_size)
        whole, rest = (part.astype(np.float64) for part in np.divmod(growing, block_size))
        return block_size * whole * (whole + 1) / 2 + rest * (whole + 1) + most * (length - growing).astype(np.float64)

    def pool_bytes(self, blocks: float, block_size: int) -> float:
        """Bytes of the tensors of a pool of `blocks` blocks in every group."""
        return blocks * block_size * self.bytes_per_token

    def held_bytes(self, length: int, block_size: int) -> int:
        """Bytes of the blocks that a row of `length` tokens holds at its peak, and of its state."""
        return self.state_bytes + sum(
            int(group.peak_blocks(length, block_size)) * block_size * group.bytes_per_token for group in self.groups
        )
