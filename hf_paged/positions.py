"""Which padded positions of the rows hold a token."""

from __future__ import annotations

import copy

import numpy as np

from hf_paged.plan import StepPlan


class StoredPositions:
    """Which padded positions are stored in blocks, and which a padding mask may show.

    The two differ in rows that have ended while generate() runs: it feeds them padding, which its mask calls real, and
    which is not stored.

    Args:
        stored: `[rows, length]` bool.

    Attributes:
        has_holes: some position is not stored.
    """

    def __init__(self, stored: np.ndarray) -> None:
        self._stored = self._unmasked = stored  # [rows, capacity]: one array until they differ
        self.has_holes = not stored.all()

    def up_to(self, length: int) -> np.ndarray:
        """`[rows, length]` bool: which of the first positions are stored."""
        return self._stored[:, :length]

    def once_written(self, step: StepPlan) -> np.ndarray | None:
        """`[rows, step.end]` bool: which positions are stored once `step` is written; None for all of them."""
        if step.new_tokens is None and not self.has_holes:
            return None
        shape = (len(step.context_lens), step.q_len)
        new = np.ones(shape, bool) if step.new_tokens is None else step.new_tokens
        return np.concatenate((self._stored[:, : step.start], new), axis=1) if step.start else new

    def add(self, step: StepPlan) -> None:
        """Add the positions of a step."""
        start, end = step.start, step.end
        if end > self._stored.shape[1]:
            self._widen(start, max(end, 2 * self._stored.shape[1], 64))
        self._stored[:, start:end] = True if step.new_tokens is None else step.new_tokens
        if self._unmasked is not self._stored:
            self._unmasked[:, start:end] = True if step.mask is None else step.mask[:, start:end]
        self.has_holes = self.has_holes or step.new_tokens is not None

    def _widen(self, length: int, capacity: int) -> None:
        stored = _wider(self._stored, length, capacity)
        unmasked = stored if self._unmasked is self._stored else _wider(self._unmasked, length, capacity)
        self._stored, self._unmasked = stored, unmasked  # together: an interrupt leaves both as they were

    def may_all_be_shown(self, length: int) -> bool:
        """Whether a mask may show all of the first positions."""
        return not self.has_holes or bool(self._unmasked[:, :length].all())

    def some_are_hidden_by(self, mask: np.ndarray) -> bool:
        """Whether `mask` `[rows, length]`, of all positions, hides stored ones.

        Raises:
            ValueError: it shows one that never was stored.
        """
        if not self.has_holes and self._unmasked is self._stored:
            return not mask.all()
        unmasked = self._unmasked[:, : mask.shape[1]]
        if np.array_equal(mask, unmasked):
            return False
        shown = mask & ~unmasked
        if shown.any():
            row, position = (int(i) for i in np.argwhere(shown)[0])
            raise ValueError(
                f"attention_mask is 1 at position {position} of row {row}, which was padding (or came after the row's "
                "end) when it was fed, and so was never stored, or belongs to a row that was released, or that had "
                "ended and whose blocks others needed when the pool was full. Pass the mask that the tokens were fed "
                "with, extended for the new ones, or start from a new cache"
            )
        return True

    def follow_ends(self) -> None:
        """Rows end from here on, whose padding a mask may show although it is not stored."""
        self._unmasked = self._stored.copy()

    def forget_ends(self) -> None:
        """A mask may show what is stored again, and nothing else."""
        self._unmasked = self._stored

    def lose(self, rows: list[int] | np.ndarray, length: int) -> None:
        """All of the first `length` positions of these rows are stored no more."""
        self._stored[rows, :length] = False
        self.has_holes = self.has_holes or bool(length and len(rows))

    def cut(self, length: int) -> None:
        """Forget the positions from `length` on."""
        self.has_holes = not self._stored[:, :length].all()

    def take(self, rows: np.ndarray, length: int) -> None:
        """Row `i` becomes what row `rows[i]` was."""
        is_one = self._unmasked is self._stored
        self._stored = self._stored[rows]
        self._unmasked = self._stored if is_one else self._unmasked[rows]
        self.cut(length)

    def copy(self) -> StoredPositions:
        twin = copy.copy(self)
        twin._stored = self._stored.copy()
        twin._unmasked = twin._stored if self._unmasked is self._stored else self._unmasked.copy()
        return twin


def _wider(array: np.ndarray, length: int, capacity: int) -> np.ndarray:
    wider = np.zeros((len(array), capacity), bool)
    wider[:, :length] = array[:, :length]
    return wider
