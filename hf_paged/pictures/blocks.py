"""What each block of a pool is, and whose: what all pictures are drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from hf_paged.batching.batcher import ContinuousBatcher
from hf_paged.cache import PagedCache
from hf_paged.recording import StepRecord, label_of, pool_of

if TYPE_CHECKING:
    from hf_paged.pool import BlockPool


T = TypeVar("T")


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
    """A map for each group of layers; of an empty pool where it has no size yet, or no cache was made on it."""
    pool = pool_of(target)
    with pool.lock:  # steps of others wait for it, so what was copied is looked at later
        tables = block_tables(target)
        groups = [group.name for group in pool.groups]
        books = [(a.num_blocks, a.num_used, *a.all_references()) for a in pool.allocators]
    if not books:
        return [BlockMap(name, 0, 0, [], [], list(tables.get(name, ()))) for name in groups or ["no layers yet"]]
    return [_map(name, tables.get(name, {}), *each) for name, each in zip(groups, books, strict=True)]


def of_group(found: list[T], group: int) -> T:
    """One of what there is for each group of layers.

    Raises:
        ValueError: there is no such group.
    """
    if not 0 <= group < len(found):
        raise ValueError(f"there is no group {group} of layers; this model has {len(found)}, counted from 0")
    return found[group]


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


def _map(
    name: str,
    tables: dict[str, list[int]],
    num_blocks: int,
    num_used: int,
    references: list[int],
    parked: dict[int, int],
) -> BlockMap:
    several = -1
    holders: dict[int, int] = {}  # block -> the one sequence, or `several`
    for index, blocks in enumerate(tables.values()):
        for block in blocks:
            holders[block] = several if block in holders else index
    free, kept, shared, other, own = State.FREE, State.KEPT, State.SHARED, State.OTHER, State.OWN
    states: list[State] = []
    owners: list[int | None] = []
    for block, total in enumerate(references):
        state, owner = free, None
        if total:
            in_use, holder = total - parked.get(block, 0), holders.get(block)
            if not in_use:
                state = kept
            elif in_use > 1:
                state = shared if holder is not None or not tables else other
            elif holder is None or holder == several:
                state = other
            else:
                state, owner = own, holder
        states.append(state)
        owners.append(owner)
    return BlockMap(name, num_blocks, num_used, states, owners, list(tables))
