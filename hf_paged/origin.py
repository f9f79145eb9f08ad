"""Where the tokens in a cache's rows came from."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np


@dataclass(eq=False, slots=True)
class Origin:
    """What generate() calls have told of the tokens that rows hold. It is forgotten with every step."""

    ids: np.ndarray | None = None
    """`[rows, length]`: the tokens at all positions, padding included, where they are known."""
    key: Hashable | None = None
    """What the blocks' contents depend on besides these tokens, where they depend on nothing else."""
    are_beams: bool = False
    """The rows are beams, in an order that only the search knew."""
    is_disposable: bool = False
    """A prompt to come has no use for what the rows hold."""

    def take(self, rows: np.ndarray) -> None:
        """Row `i` becomes what row `rows[i]` was."""
        self.ids = None if self.ids is None else self.ids[rows]

    def cut(self, length: int) -> None:
        """Forget the positions from `length` on."""
        self.ids = None if self.ids is None else self.ids[:, :length]
