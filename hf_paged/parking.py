"""Whose blocks may be taken when the free ones run out: rows that have ended, and prompts that are kept for later."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hf_paged.allocator import BlockAllocator
    from hf_paged.prefix import PrefixIndex


class Holder(Protocol):
    """Has parked block tables, by row."""

    def lose(self, row: int) -> None:
        """Release the tables of a row in all groups. The caller has the pool's lock."""


class Parking:
    """The parked rows of a pool, in the order in which they were parked. Holders are held weakly.

    Args:
        drain: releases what dead holders gave back, and says whether there was any.
    """

    def __init__(self, drain: Callable[[], bool]) -> None:
        self.drain = drain
        self._rows: dict[tuple[int, int], weakref.ref[Holder]] = {}
        self.prefixes: PrefixIndex | None = None
        """Prompts that are kept, if they are."""

    def add(self, holder: Holder, row: int) -> None:
        self._rows[id(holder), row] = weakref.ref(holder)

    def remove(self, holder: Holder, row: int) -> None:
        self._rows.pop((id(holder), row), None)

    def reclaim(self, allocator: BlockAllocator) -> bool:
        """Release the row that was parked first, or else the kept block that was used last long ago; False if there is
        nothing to release."""
        if self.drain():
            return True
        while self._rows:
            key = next(iter(self._rows))
            holder = self._rows.pop(key)()
            if holder is not None:
                holder.lose(key[1])
                return True
        return self.prefixes is not None and self.prefixes.evict()
