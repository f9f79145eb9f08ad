"""The pool as letters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_paged.pictures.blocks import BlockMap, State, block_maps

if TYPE_CHECKING:
    from hf_paged.batching.batcher import ContinuousBatcher
    from hf_paged.cache import PagedCache
    from hf_paged.pool import BlockPool

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
MOST_MARKS = 4096
MARKS = {State.SHARED: "#", State.OTHER: "?", State.KEPT: "+", State.FREE: "·", State.FRESH: "·"}


def mark(blocks: BlockMap, block: int) -> str:
    """The letter of the sequence that alone holds a block, or what else it is."""
    owner = blocks.owners[block]
    return MARKS[blocks.states[block]] if owner is None else letter(owner)


def letter(sequence: int) -> str:
    """The letters begin again after 52 sequences."""
    return LETTERS[sequence % len(LETTERS)]


def last_held(blocks: BlockMap) -> int:
    """Blocks up to the last that is not free."""
    held = len(blocks.states)
    while held and blocks.states[held - 1] is State.FREE:
        held -= 1
    return held


def text_map(target: PagedCache | BlockPool | ContinuousBatcher, width: int = 64) -> str:
    """The blocks as lines of marks, `width` to a line, with a legend; one such map for each group of layers.

    Of more than 4,096 blocks the first are shown.
    """
    maps = block_maps(target)
    return "\n".join(_one_map(blocks, width, f"{blocks.group}: " if len(maps) > 1 else "") for blocks in maps)


def _one_map(blocks: BlockMap, width: int, name: str) -> str:
    shown = min(last_held(blocks), MOST_MARKS)
    marks = "".join(mark(blocks, block) for block in range(shown))
    lines = [marks[start : start + width] for start in range(0, len(marks), width)]
    if more := last_held(blocks) - shown:
        lines.append(f"and {more:,} more")
    of_a_batch = any(label.startswith("request") for label in blocks.labels)
    legend = [f"a letter a {'request' if of_a_batch else 'row'}, # shared, · free"]
    legend += [f"{MARKS[state]} {text}" for state, text in _RARE.items() if MARKS[state] in marks]
    lines.append(f"{name}{count(blocks)}; {', '.join(legend)}")
    return "\n".join(lines)


_RARE = {State.OTHER: "of another cache", State.KEPT: "kept, gives way"}


def count(blocks: BlockMap) -> str:
    """How many are in use."""
    if not blocks.num_blocks:
        return "no blocks in use yet"
    return f"{blocks.num_used:,} of {blocks.num_blocks:,} blocks in use"
