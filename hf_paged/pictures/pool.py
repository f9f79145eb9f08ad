"""The pool as a map of squares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_paged.pictures import canvas, colours
from hf_paged.pictures.blocks import BlockMap, State, block_maps, of_group
from hf_paged.pictures.text import letter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hf_paged.batching.batcher import ContinuousBatcher
    from hf_paged.cache import PagedCache
    from hf_paged.pool import BlockPool

COLUMNS = (16, 32, 48, 64, 96)
MOST_BLOCKS = 5520
MOST_NAMES = 17
"""Sequences that the legend names."""
SMALLEST_LETTER = 3.0
"""Points."""

FILL = {State.SHARED: colours.SHARED, State.OTHER: colours.OTHER, State.KEPT: colours.KEPT}
HATCH = {State.SHARED: "xxxx", State.KEPT: "////"}


def draw_pool(target: PagedCache | BlockPool | ContinuousBatcher, *, group: int = 0, ax: Axes | None = None) -> Axes:
    """Draw every block: free, never used, held by one sequence, shared, or kept for later.

    A sequence has a colour and a letter. Blocks beyond the last that was ever used are drawn while they are few, else
    told as a number.

    Args:
        target: a cache or a batcher, whose sequences are told apart; or a pool, which does not know them.
        group: which group of layers; most models have one.
        ax: where to draw; by default a new figure.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is no such group.
    """
    blocks = of_group(block_maps(target), group)
    known = min(len(blocks.states), MOST_BLOCKS)
    columns = next(width for width in COLUMNS if known <= 0.6 * width * width or width == COLUMNS[-1])
    shown = min(blocks.num_blocks, max(columns * (-(-known // columns) + 1), 128))
    lines = max(-(-shown // columns), 1)
    owners = sorted({owner for owner in blocks.owners if owner is not None})
    # So high that the map fills the width.
    legend = 0.19 * (min(len(owners), MOST_NAMES + 1) // canvas.LEGEND_COLUMNS + 2)
    ax = canvas.axes(ax, height=0.7 + legend + (canvas.WIDTH - 0.7) * lines / columns)
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Patch, Rectangle

    by_look: dict[tuple[Any, ...], list[int]] = {}
    for block in range(shown):
        state = blocks.states[block] if block < len(blocks.states) else State.FRESH
        by_look.setdefault((state, blocks.owners[block] if block < len(blocks.owners) else None), []).append(block)
    for (state, owner), members in by_look.items():
        squares = [Rectangle((b % columns + 0.06, b // columns + 0.06), 0.88, 0.88) for b in members]
        ax.add_collection(PatchCollection(squares, **_look(ax, state, owner)))
    points = min(canvas.inches(ax)[0] * canvas.INCH / columns * 0.75, 9)
    for (state, owner), members in by_look.items():
        if state is State.OWN and points >= SMALLEST_LETTER:
            places = [(block % columns + 0.5, block // columns + 0.5) for block in members]
            colour = colours.ink_on(colours.of_sequence(owner))
            ax.add_collection(canvas.letters(ax, letter(owner), places, size=points, color=colour))
    ax.set(xlim=(0, columns), ylim=(lines, 0), aspect="equal", ylabel="block")
    step = max(lines // 8, 1)
    ax.set_yticks([line + 0.5 for line in range(0, lines, step)])
    ax.set_yticklabels([f"{line * columns:,}" for line in range(0, lines, step)])
    ax.set_xticks([])
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    more = blocks.num_blocks - shown
    ax.set_xlabel(f"{columns} a line" + (f"; {more:,} more are not drawn" if more else ""), loc="left")
    canvas.title(ax, f"Blocks: {blocks.group}", _figures(blocks))

    handles = [
        Patch(label=f"{letter(owner)}  {blocks.labels[owner]}", **_look(ax, State.OWN, owner))
        for owner in owners[:MOST_NAMES]
    ]
    if len(owners) > MOST_NAMES:
        handles.append(Patch(visible=False, label=f"and {len(owners) - MOST_NAMES:,} more"))
    handles += [
        Patch(label=blocks.name(state), **_look(ax, state, None))
        for state in State
        if state is not State.OWN and any(look[0] is state for look in by_look)
    ]
    canvas.legend_below(ax, handles)
    return ax


def _look(ax: Axes, state: State, owner: int | None) -> dict[str, Any]:
    line = canvas.ink(ax)
    if owner is not None:
        return {"facecolor": colours.of_sequence(owner), "edgecolor": "none"}
    if state is State.FREE:
        return {"facecolor": "none", "edgecolor": line, "linewidth": 0.6}
    if state is State.FRESH:
        return {"facecolor": "none", "edgecolor": line, "linewidth": 0.6, "linestyle": ":", "alpha": 0.7}
    hatch = HATCH.get(state)
    edge = {State.SHARED: "#FFFFFF", State.KEPT: "#707078"}.get(state, "none")
    return {"facecolor": FILL[state], "edgecolor": edge, "hatch": hatch, "linewidth": 0.0}


def _figures(blocks: BlockMap) -> str:
    if not blocks.num_blocks:
        return "no size yet: nothing was stored"
    kept = blocks.count(State.KEPT)
    free = blocks.num_blocks - blocks.num_used - kept
    return f"{blocks.num_used:,} in use, " + (f"{kept:,} kept, " if kept else "") + f"{free:,} free"
