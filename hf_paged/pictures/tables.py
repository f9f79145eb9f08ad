"""Block tables: which physical block each logical block of a sequence is."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from hf_paged.pictures import canvas, colours
from hf_paged.pictures.blocks import block_tables, of_group
from hf_paged.pictures.pool import FILL, HATCH, State
from hf_paged.pool import BlockPool

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

    from hf_paged.batching.batcher import ContinuousBatcher
    from hf_paged.cache import PagedCache
    from hf_paged.recording import StepRecord

MOST_NUMBERED = 600
"""Blocks up to which each has its number written on it."""
MOST_ARROWS = 200


def draw_block_tables(
    source: PagedCache | ContinuousBatcher | StepRecord, *, group: int = 0, ax: Axes | None = None
) -> Axes:
    """Draw block tables as rows: a line for each sequence, a cell for each logical block, in it the physical one.

    Shared blocks are hatched. Where there are too many cells for numbers, colours tell which block it is.

    Args:
        source: a cache, a batcher, or a step that was recorded with `tables=True`.
        group: which group of layers; most models have one.
        ax: where to draw; by default a new figure.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: a pool alone was passed, or something else.
        ValueError: the step was recorded without block tables, or there is no such group.
    """
    name, tables = _tables_of(source, group)
    lines, columns = max(len(tables), 1), max(map(len, tables.values()), default=0) or 1
    ax = canvas.axes(ax, height=min(1.3 + 0.28 * lines, 8.0))
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Patch, Rectangle

    width, height = canvas.inches(ax)
    size = min(width / columns, height / lines) * canvas.INCH * 0.45
    digits = len(str(max((block for blocks in tables.values() for block in blocks), default=0)))
    size = min(size, width / columns * canvas.INCH / (0.75 * digits), 9)
    is_numbered = sum(map(len, tables.values())) <= MOST_NUMBERED and size >= 4.5
    held = Counter(block for blocks in tables.values() for block in blocks)
    gap = 0.05 if is_numbered else 0.0
    squares: dict[Any, list[Rectangle]] = {}
    cells = []
    for line, blocks in enumerate(tables.values()):
        for entry, block in enumerate(blocks):
            square = Rectangle((entry + gap, line + 2 * gap), 1 - 2 * gap, 1 - 4 * gap)
            cells.append((square, block))
            if is_numbered:
                is_shared = held[block] > 1
                squares.setdefault(None if is_shared else line, []).append(square)
                ink = "#000000" if is_shared else colours.ink_on(colours.of_sequence(line))
                number = ax.text(
                    entry + 0.5, line + 0.53, str(block), color=ink, fontsize=size, ha="center", va="center"
                )
                if is_shared:
                    _clear_ground(number)
    handles = []
    if is_numbered:
        for line, members in squares.items():
            look = _shared(light=True) if line is None else {"facecolor": colours.of_sequence(line)}
            ax.add_collection(PatchCollection(members, zorder=0, **({"edgecolor": "none", "linewidth": 0} | look)))
        if None in squares:
            handles = [Patch(label="shared", **_shared(light=True))]
    elif cells:
        collection = PatchCollection([square for square, _ in cells], cmap="cividis", edgecolor="none")
        collection.set_array([block for _, block in cells])
        ax.add_collection(collection)
        shared = [square for square, block in cells if held[block] > 1]
        if shared:
            ax.add_collection(PatchCollection(shared, facecolor="none", edgecolor="#FFFFFF", hatch="////", linewidth=0))
            handles = [Patch(label="shared", facecolor=colours.SHARED, edgecolor="#FFFFFF", hatch="////", linewidth=0)]
        ax.figure.colorbar(collection, ax=ax, label="physical block", pad=0.01, aspect=30)
    ax.set(xlim=(0, columns), ylim=(lines, 0), xlabel=f"logical block{_counted(name)}")
    step = canvas.round_step(columns, 16)
    ax.set_xticks([entry + 0.5 for entry in range(0, columns, step)], labels=range(0, columns, step))
    _name_lines(ax, list(tables))
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    total, unique = sum(held.values()), len(held)
    canvas.title(ax, f"Block tables: {name}", f"{total:,} entries, {unique:,} blocks")
    canvas.legend_below(ax, handles, has_ticks=True)
    return ax


def draw_mapping(
    source: PagedCache | ContinuousBatcher | StepRecord, *, group: int = 0, ax: Axes | None = None
) -> Axes:
    """Draw block tables as arrows, from each sequence's logical blocks to the physical ones in the pool.

    It is meant for a few short sequences; of more than 200 blocks in all, the first are drawn.

    Args:
        source, group, ax: as for `draw_block_tables`.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: a pool alone was passed, or something else.
        ValueError: the step was recorded without block tables, or there is no such group.
    """
    name, tables = _tables_of(source, group)
    entries = [(line, entry, block) for line, t in enumerate(tables.values()) for entry, block in enumerate(t)]
    shown, labels = entries[:MOST_ARROWS], list(tables)
    ax = canvas.axes(ax, height=3.6)
    from matplotlib.collections import LineCollection, PatchCollection
    from matplotlib.patches import Patch, Rectangle

    held = Counter(block for _, _, block in shown)
    last = max(held, default=-1)
    # The sequences side by side above, a gap between them; the pool below, over the same width.
    starts, where = [], 0.0
    for line in range(len(labels)):
        starts.append(where)
        where += sum(one[0] == line for one in shown) + 0.8
    width = max(where - 0.8, last + 1, 1)
    stretch, pool_stretch = width / max(where - 0.8, 1), width / max(last + 1, 1)
    squares: dict[Any, list[Rectangle]] = {}
    arrows, arrow_colours = [], []
    for line, entry, block in shown:
        left = (starts[line] + entry) * stretch
        colour = colours.of_sequence(line)
        squares.setdefault(line, []).append(Rectangle((left, 2.0), stretch * 0.94, 0.3))
        arrows.append([(left + stretch * 0.47, 2.0), ((block + 0.47) * pool_stretch, 0.3)])
        arrow_colours.append(colour)
    for block in range(last + 1):
        holders = [line for line, _, one in shown if one == block]
        look = "free" if not holders else None if len(holders) > 1 else holders[0]
        squares.setdefault(look, []).append(Rectangle((block * pool_stretch, 0.0), pool_stretch * 0.94, 0.3))
    for look, members in squares.items():
        if look == "free":
            style = {"facecolor": "none", "edgecolor": canvas.ink(ax), "linewidth": 0.6}
        else:
            style = _shared(light=True) if look is None else {"facecolor": colours.of_sequence(look)}
        ax.add_collection(PatchCollection(members, **({"edgecolor": "none"} | style)))
    ax.add_collection(LineCollection(arrows, colors=arrow_colours, linewidths=1.2))
    tips = [arrow[1] for arrow in arrows]
    if tips:
        ax.scatter(*zip(*tips, strict=True), marker="v", s=14, c=arrow_colours, zorder=3)
    points = canvas.inches(ax)[0] * canvas.INCH / width
    for line, label in enumerate(labels):
        count = len(squares.get(line, [])) and sum(one[0] == line for one in shown)
        if count:
            ax.text(starts[line] * stretch, 2.42, label, fontsize=canvas.SMALL, color=canvas.ink(ax))
    if points * stretch * 0.5 >= 5:
        for line, entry, _ in shown:
            ink = colours.ink_on(colours.of_sequence(line))
            x = (starts[line] + entry + 0.47) * stretch
            ax.text(x, 2.15, str(entry), fontsize=min(points * stretch * 0.5, 9), color=ink, ha="center", va="center")
    if points * pool_stretch * 0.45 >= 5:
        for block in range(last + 1):
            holders = {line for line, _, one in shown if one == block}
            ink = colours.ink_on(colours.of_sequence(min(holders))) if len(holders) == 1 else "#000000"
            ink = ink if holders else canvas.ink(ax)
            x = (block + 0.47) * pool_stretch
            size = min(points * pool_stretch * 0.45, 9)
            number = ax.text(x, 0.15, str(block), fontsize=size, color=ink, ha="center", va="center")
            if len(holders) > 1:
                _clear_ground(number)
    ax.set(xlim=(-0.1, width), ylim=(-0.15, 2.7), xticks=[])
    ax.set_yticks([2.15, 0.15], labels=["logical\nblocks", "physical\nblocks"])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    more = len(entries) - len(shown)
    ax.set_xlabel(_counted(name).removeprefix(", "), loc="left")
    detail = f"the first {len(shown)} of {len(entries):,} entries" if more else "" if entries else "no entries"
    canvas.title(ax, f"Block tables: {name}", detail)
    handles = [Patch(label="shared", **_shared(light=True))] if None in squares else []
    if "free" in squares:
        handles.append(Patch(label="not theirs", facecolor="none", edgecolor=canvas.ink(ax), linewidth=0.6))
    canvas.legend_below(ax, handles)
    return ax


def _tables_of(source: PagedCache | ContinuousBatcher | StepRecord, group: int) -> tuple[str, dict[str, list[int]]]:
    """The name of a group of layers, and its tables by sequence."""
    if isinstance(source, BlockPool):
        raise TypeError(
            "a pool alone does not know whose its blocks are; pass a PagedCache, a ContinuousBatcher, or a step that "
            "was recorded with tables=True"
        )
    found = block_tables(source)
    return of_group(list(found.items()), group)


def _counted(group: str) -> str:
    """What is to be said of the numbers of logical blocks: those before a window have no place in a table."""
    return ", counted from the first that is held" if group.startswith("sliding_attention") else ""


def _shared(*, light: bool) -> dict[str, Any]:
    """Shared blocks; light ones have a number on them."""
    face = colours.KEPT if light else FILL[State.SHARED]
    return {"facecolor": face, "edgecolor": "#909098", "hatch": HATCH[State.SHARED][:3], "linewidth": 0}


def _clear_ground(number: Text) -> None:
    """Keep the hatching away from a number on a shared block."""
    from matplotlib.patheffects import withStroke

    number.set_path_effects([withStroke(linewidth=3, foreground=colours.KEPT)])


def _name_lines(ax: Axes, labels: list[str]) -> None:
    step = canvas.round_step(len(labels), 24)
    ax.set_yticks([line + 0.5 for line in range(0, len(labels), step)], labels=labels[::step])
