"""What a cache holds, in blocks, tokens and bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hf_paged.rows import Rows


@dataclass(frozen=True)
class CacheStats:
    """One look at a cache and its pool.

    Three figures are told apart: what is reserved (the tensors), what is in use (blocks that somebody holds), and what
    the real tokens themselves take. Block counts are sums over the groups of layers; most models have one group.
    """

    block_size: int
    """Tokens per block."""
    total_blocks: int
    """Blocks in the pool; 0 before its size is settled at first use."""
    used_blocks: int
    """Blocks that any cache on the pool holds."""
    free_blocks: int
    shared_blocks: int
    """Blocks that several rows of this cache, or other caches too, hold."""
    peak_blocks: int
    """The most blocks of the pool that were in use at once while rows grew: a pool of so many would have done. Rows
    that had ended are not counted, since their blocks are free for others while a generate() call goes on."""
    tokens: int
    """Real tokens over all rows of this cache, padding not counted; a token in a shared block counts for each row."""
    reserved_bytes: int
    """Bytes of the pool's tensors. On a CPU the system commits them only as blocks are written."""
    used_bytes: int
    """Bytes of the blocks in use."""
    peak_bytes: int
    """Bytes of `peak_blocks`."""
    token_bytes: int
    """Bytes of the slots that hold a token in the blocks of this cache, a shared one counted once."""
    waste: float
    """Share of the slots in this cache's blocks that hold no token, 0.0 to 1.0."""

    def as_dict(self) -> dict[str, int | float]:
        """The same as a dict, for JSON."""
        return asdict(self)


def collect_stats(rows: Rows) -> CacheStats:
    """Count what `rows` and its pool hold. Costs time in proportion to the blocks of the rows."""
    pool = rows.pool
    size = pool.block_size
    with pool.lock:
        bytes_per_block = [pool.bytes_per_block(group) for group in range(len(pool.groups))]
        shared = token_bytes = slots = filled_slots = 0
        for allocator, tables, per_block in zip(pool.allocators, rows.tables, bytes_per_block, strict=False):
            filled: dict[int, int] = {}
            for table in tables:
                for entry, block in enumerate(table.blocks, start=table.first):
                    filled[block] = max(filled.get(block, 0), min(size, table.length - entry * size))
            shared += sum(allocator.is_shared(block) for block in filled)
            slots += len(filled) * size
            filled_slots += sum(filled.values())
            token_bytes += sum(filled.values()) * per_block // size
        return CacheStats(
            block_size=size,
            total_blocks=sum(a.num_blocks for a in pool.allocators),
            used_blocks=sum(a.num_used for a in pool.allocators),
            free_blocks=sum(a.num_free for a in pool.allocators),
            shared_blocks=shared,
            peak_blocks=sum(a.peak_used for a in pool.allocators),
            tokens=int(rows.stored_lens.sum()),
            reserved_bytes=pool.reserved_bytes,
            used_bytes=sum(a.num_used * b for a, b in zip(pool.allocators, bytes_per_block, strict=False)),
            peak_bytes=sum(a.peak_used * b for a, b in zip(pool.allocators, bytes_per_block, strict=False)),
            token_bytes=token_bytes,
            waste=1 - filled_slots / slots if slots else 0.0,
        )
