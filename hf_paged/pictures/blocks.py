"""What each block of a pool is, and whose: what all pictures are drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from hf_paged.batching.batcher import ContinuousBatcher
from hf_paged.cache import PagedCache
from hf_paged.recording import StepRecord, label_of, pool_of

if TYPE_CHECKING:
    from hf_paged.allocator import BlockAllocator
    from hf_paged.pool import BlockPool


class State(Enum):
    """What a block is; the value is how a legend names it."""

    OWN = "one sequence"
    SHARED = "shared"
    OTHER = "of others"
    KEPT = "kept, gives way"
    FREE = "free"
    FRESH = "never used"


@dataclass(frozen=True)
class BlockMap:
    """The blocks of one group of layers.

    Attributes:
        group: name of the group of layers.
        num_blocks, num_used: of the pool.
        states: of each block up to the last that was ever used. `OTHER` are used blocks that no sequence of the target
            holds.
        owners: the sequence that alone holds the block, as an index into `labels`; None for blocks that are not `OWN`.
        labels: the sequences, such as `row 0`.
    """

    group: str
    num_blocks: int
    num_used: int
    states: list[State]
    owners: list[int | None]
    labels: list[str]

    def count(self, state: State) -> int:
        """Blocks in a state."""
        return self.num_blocks - len(self.states) if state is State.FRESH else self.states.count(state)

    def name(self, state: State) -> str:
        """What a state is called here: where no sequences are known, a used block is nobody's in particular."""
        return "in use" if state is State.OTHER and not self.labels else state.value

    def describe(self, block: int) -> str:
        """Such as `block 3: row 1`."""
        owner = self.owners[block]
        return f"block {block}: {self.name(self.states[block]) if owner is None else self.labels[owner]}"


def block_maps(target: PagedCache | BlockPool | ContinuousBatcher) -> list[BlockMap]:
    """A map for each group of layers; of an empty pool where it has no size yet."""
    pool = pool_of(target)
    with pool.lock:
        tables = block_tables(target)
        maps = []
        for number, group in enumerate(pool.groups):
            of_group = tables.get(group.name, {})
            if pool.is_sized:
                maps.append(_map(group.name, pool.allocators[number], of_group))
            else:
                maps.append(BlockMap(group.name, 0, 0, [], [], list(of_group)))
        return maps


def block_tables(source: PagedCache | BlockPool | ContinuousBatcher | StepRecord) -> dict[str, dict[str, list[int]]]:
    """By group of layers and by sequence, the physical blocks in order. A pool alone does not know who holds them.

    Raises:
        ValueError: the tables were not recorded.
    """
    if isinstance(source, StepRecord):
        if source.block_tables is None:
            raise ValueError("this step was recorded without its block tables; use record(..., tables=True)")
        return {name: {label: list(b) for label, b in group.items()} for name, group in source.block_tables.items()}
    if isinstance(source, PagedCache):
        return {
            name: {f"row {row}": blocks for row, blocks in enumerate(rows)}
            for name, rows in source.block_tables.items()
        }
    pool = pool_of(source)
    sequences = source.running if isinstance(source, ContinuousBatcher) else []
    with pool.lock:
        return {
            group.name: {label_of(s.handle.index, s.handle.sample): list(s.tables[number].blocks) for s in sequences}
            for number, group in enumerate(pool.groups)
        }


def _map(name: str, allocator: BlockAllocator, tables: dict[str, list[int]]) -> BlockMap:
    holders: dict[int, list[int]] = {}
    for index, blocks in enumerate(tables.values()):
        for block in blocks:
            holders.setdefault(block, []).append(index)
    states: list[State] = []
    owners: list[int | None] = []
    for block in range(allocator.high_water):
        total, held_by = allocator.references(block), holders.get(block, [])
        in_use = total - allocator.parked_references(block)
        owner = None
        if not total:
            state = State.FREE
        elif not in_use:
            state = State.KEPT
        elif in_use > 1:
            state = State.SHARED if held_by or not tables else State.OTHER
        elif len(held_by) == 1:
            state, owner = State.OWN, held_by[0]
        else:
            state = State.OTHER
        states.append(state)
        owners.append(owner)
    return BlockMap(name, allocator.num_blocks, allocator.num_used, states, owners, list(tables))
