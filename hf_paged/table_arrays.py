"""The block tables of a cache's rows as arrays, which plans and kernels read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from hf_paged.allocator import BlockTable, Growth

_stamps = itertools.count()  # over the tables of all caches


class TableArrays:
    """Arrays that follow block tables: after a step only what has changed is written.

    Attributes:
        arrays: by group of layers, `[rows, capacity]` int32; `sync` replaces one that is too narrow.
        stamps: by group, a number that no other contents of an array have.
        are_stale: the tables changed in another way than by growing, so that all of them must be read again.
    """

    def __init__(self, num_groups: int = 0, num_rows: int = 0, *, are_stale: bool = False) -> None:
        self.arrays = [np.zeros((num_rows, 0), np.int32) for _ in range(num_groups)]
        self.stamps = [-1] * num_groups
        self.are_stale = are_stale

    def for_rows(self, num_rows: int) -> TableArrays:
        """Arrays of the same capacity for other rows, whose tables have not been read."""
        other = TableArrays(are_stale=True)
        other.arrays = [np.zeros((num_rows, array.shape[1]), np.int32) for array in self.arrays]
        other.stamps = [-1] * len(self.arrays)
        return other

    def sync(self, tables: Sequence[Sequence[BlockTable]], growths: Sequence[Growth]) -> None:
        """Follow the tables of all groups, which a step let grow."""
        for group, growth in enumerate(growths):
            if growth.changed or self.are_stale:
                self.stamps[group] = next(_stamps)
                self._follow(group, tables[group], growth)
        self.are_stale = False

    def _follow(self, group: int, tables: Sequence[BlockTable], growth: Growth) -> None:
        array, stale = self.arrays[group], self.are_stale
        grown = tables if stale else [tables[row] for row, _ in growth.changed]
        most = max(table.first + len(table.blocks) for table in grown)
        if most > array.shape[1]:
            array = np.zeros((len(tables), max(most, 2 * array.shape[1], 8)), np.int32)
            self.arrays[group], stale = array, True
        if stale:
            for row, table in enumerate(tables):
                array[row, table.first : table.first + len(table.blocks)] = table.blocks
        else:
            for row, entry in growth.changed:
                blocks, first = tables[row].blocks, tables[row].first
                array[row, first + entry : first + len(blocks)] = blocks[entry:]
