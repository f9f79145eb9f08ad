"""The prompts of one cache: what it knows of those it holds, and what the pool keeps of them for later.

`hf_paged.patches.prompts` asks, around the generate() calls of an enabled model.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from hf_paged.rows import Rows


class KeptPrompts:
    """What generate() calls of an enabled model ask of a cache about prompts.

    Args:
        rows: of the cache.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    @property
    def are_kept(self) -> bool:
        """Whether full blocks are kept for later calls; recurrent state cannot be."""
        return self._rows.pool.prefixes is not None and not self._rows.has_state

    # What the rows hold -------------------------------------------------------------------------------------------

    @property
    def are_known(self) -> bool:
        """Whether what the rows hold came from generate() calls that were followed, or is of no use."""
        origin = self._rows.origin
        return origin.ids is not None or origin.is_disposable

    @property
    def are_beams(self) -> bool:
        """Whether the rows are beams of a search that has ended."""
        return self._rows.origin.are_beams

    def go_on(self, key: Hashable, ids: np.ndarray, mask: np.ndarray) -> bool:
        """Whether a prompt `[rows, length]` begins with what the cache holds under this key, and has more."""
        origin, held = self._rows.origin, self._rows.origin.ids
        return (
            held is not None
            and origin.key == key
            and held.shape[0] == ids.shape[0]
            and held.shape[1] < ids.shape[1]
            and np.array_equal(held, ids[:, : held.shape[1]])
            and self._rows.stores_as(mask[:, : held.shape[1]])
        )

    def first_difference(self, ids: np.ndarray) -> tuple[int, int] | None:
        """The first `(row, position)` at which a prompt `[rows, length]` has another token than is stored, as far as it
        is known what is stored."""
        held = self._rows.origin.ids
        if held is None or held.shape[0] != ids.shape[0]:
            return None
        length = min(held.shape[1], ids.shape[1])
        other = (held[:, :length] != ids[:, :length]) & self._rows.stored[:, :length]
        found = np.argwhere(other)
        return None if len(found) == 0 else (int(found[0][0]), int(found[0][1]))

    def note_tokens(self, ids: np.ndarray) -> None:
        """Note which tokens the rows hold, `[rows, length]`, for checks of prompts to come."""
        self._rows.origin.ids = ids.copy()

    def note_beams(self) -> None:
        """Note that the rows are beams, of which only the search knew which is which."""
        self._rows.origin.are_beams = True

    def let_go(self) -> None:
        """Note that what the rows hold is of no use to another generate() call."""
        self._rows.origin.is_disposable = True

    # What the pool keeps ------------------------------------------------------------------------------------------

    def adopt(self, key: Hashable, ids: np.ndarray, mask: np.ndarray) -> None:
        """Take the beginnings of prompts from the blocks that are kept; the cache must be empty.

        All rows begin at the same padded position. So rows take as much as the one that has least, at its right end.
        One position at least is left to compute.

        Args:
            key: what keys and values depend on besides the tokens.
            ids, mask: `[rows, length]`, padded on the left.
        """
        pool, (num_rows, length) = self._rows.pool, ids.shape
        pads = length - mask.sum(axis=1)
        if not pool.is_sized or (mask != (np.arange(length) >= pads[:, None])).any():
            return
        with pool.lock:
            chains = [pool.prefixes.match(key, ids[row, pads[row] :].tolist()) for row in range(num_rows)]
            begin = min(length - 1, *(int(pads[row]) + len(chains[row]) * pool.block_size for row in range(num_rows)))
            stored = mask[:, :begin].astype(bool)
            if not stored.any():
                return
            blocks = [
                [[node.tables[group].blocks[0] for node in chain] for chain in chains]
                for group in range(len(pool.groups))
            ]
            self._rows.adopt(stored, blocks)

    def keep(self, key: Hashable, ids: np.ndarray) -> None:
        """Keep the full blocks of all rows.

        Args:
            key: what keys and values depend on besides the tokens.
            ids: `[rows, positions]`: the tokens at the first padded positions, or at all of them.
        """
        rows, pool = self._rows, self._rows.pool
        with pool.lock:
            for row in range(rows.num_rows):
                tokens = rows.tokens_of(row, ids)
                pool.prefixes.insert(key, tokens, [tables[row] for tables in rows.tables])
        if ids.shape[1] == rows.length:
            rows.origin.ids, rows.origin.key = ids.copy(), key
        else:
            rows.origin.is_disposable = True
