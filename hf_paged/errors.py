"""Errors of our own. Each says what was asked, what was found, and what to do."""

from __future__ import annotations


class OutOfBlocksError(RuntimeError):
    """A step needs more blocks than the pool has free. The cache is as it was before the step.

    Attributes:
        needed: blocks that the step needed on top of those in use.
        free: blocks that were free.
        total: blocks in the pool.
        block_size: tokens per block.
    """

    def __init__(self, needed: int, free: int, total: int, block_size: int) -> None:
        self.needed, self.free, self.total, self.block_size = needed, free, total, block_size
        super().__init__(
            f"this step needs {needed:,} more block{'s' if needed != 1 else ''} of {block_size} tokens, but only "
            f"{free:,} of {total:,} are free (the pool holds {total * block_size:,} tokens in all). Nothing was "
            "changed. Make the pool larger (`num_blocks=` or `max_memory=` of PagedCache), run fewer or shorter rows, "
            "or give blocks back with `cache.release(rows)`, `cache.reset()`, or by deleting other caches on the same "
            "pool."
        )

    def __reduce__(self) -> tuple:
        return type(self), (self.needed, self.free, self.total, self.block_size)
