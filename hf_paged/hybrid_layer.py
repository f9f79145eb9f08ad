"""Layers that have attention and a recurrent state side by side (Falcon-H1, Zamba)."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from hf_paged.layer import PagedLayer
from hf_paged.rows import Rows


class HybridPagedLayer(PagedLayer, LinearAttentionCacheLayerMixin):
    """A layer whose keys and values are in blocks, and whose state is in transformers' own layer.

    Attributes:
        state: that layer.
    """

    def __init__(self, rows: Rows, index: int, group: int, **state_options: Any) -> None:
        super().__init__(rows, index, group)
        self.state = LinearAttentionLayer(**state_options)

    def __getattr__(self, name: str) -> Any:
        # What transformers and models read of the state: `conv_states`, `has_previous_state` and the like.
        state = self.__dict__.get("state")
        if state is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(state, name)

    @property
    def is_croppable(self) -> bool:
        return self.state.is_croppable

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """With keys and values find the blocks; with named states make those."""
        if args:
            PagedLayer.lazy_initialization(self, *args)
        else:
            self.state.lazy_initialization(**kwargs)

    def update_conv_state(self, conv_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As of transformers' own layer."""
        return self.state.update_conv_state(conv_states, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As of transformers' own layer."""
        return self.state.update_recurrent_state(recurrent_states, *args, **kwargs)

    def activate_past_recording(self) -> None:
        """Keep states that a rollback would need."""
        super().activate_past_recording()
        self.state.activate_past_recording()
