"""What all drawings need: matplotlib, axes, and colours that fit the ground they are drawn on."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PathCollection

WIDTH = 8.0
"""Inches; a notebook shows them whole."""
NARROW = 5.5
SMALL = "small"
"""Size of texts beside the data."""
INCH = 72
"""Points."""
LEGEND_COLUMNS = 6


def axes(ax: Axes | None, height: float) -> Axes:
    """The caller's axes, or new ones, which a notebook shows at the end of the cell.

    Raises:
        ImportError: matplotlib is not installed.
    """
    return _pyplot().subplots(figsize=(WIDTH, height), layout="constrained")[1] if ax is None else ax


def axes_above_one_another(ax: Axes | None, heights: tuple[float, float]) -> tuple[Axes, Axes]:
    """The caller's axes, or new ones, and others below with the same x-axis.

    Args:
        heights: inches.
    """
    if ax is not None:  # the layout is the caller's, so the second goes with the first
        share = heights[1] / heights[0]
        return ax, ax.inset_axes([0.0, -share - 0.2 / heights[0], 1.0, share], sharex=ax)
    options = {"figsize": (WIDTH, sum(heights) + 1.0), "height_ratios": heights, "layout": "constrained"}
    return tuple(_pyplot().subplots(2, 1, sharex=True, **options)[1])


def _pyplot() -> ModuleType:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('drawing needs matplotlib: pip install "hf-paged[notebook]"') from error
    return plt


def letters(ax: Axes, letter: str, places: list[tuple[float, float]], *, size: float, color: str) -> PathCollection:
    """One letter at many places, as one object: thousands of texts would take seconds to draw.

    Args:
        size: points.
    """
    from matplotlib.collections import PathCollection
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import Affine2D, IdentityTransform

    path = TextPath((0, 0), letter, size=1, prop={"weight": "bold" if size < 7 else "normal"})
    box = path.get_extents()
    path = path.transformed(Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2))
    found = PathCollection(
        [path], sizes=[size**2], offsets=places, offset_transform=ax.transData, facecolor=color, linewidth=0
    )
    found.set_transform(IdentityTransform())  # the size is in points, not in the axes' units
    found.set_gid(letter)
    return found


def inches(ax: Axes) -> tuple[float, float]:
    """Width and height of the axes, roughly: the layout is made later."""
    size = ax.get_window_extent().transformed(ax.figure.dpi_scale_trans.inverted())
    return size.width, size.height


def ink(ax: Axes) -> Any:
    """The colour of lines and text: that of the axes' labels, so light on a dark ground."""
    return ax.xaxis.label.get_color()


def legend_below(ax: Axes, handles: list[Any], *, columns: int = LEGEND_COLUMNS, has_ticks: bool = False) -> None:
    """A legend under the axes, where no data is, below the label of the x-axis.

    Args:
        has_ticks: whether numbers stand there, too.
    """
    if handles:
        ax.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(0.0, 0.0),
            ncols=columns,
            frameon=False,
            fontsize=SMALL,
            handlelength=1.4,
            columnspacing=1.2,
            borderpad=0.0,
            borderaxespad=4.2 if has_ticks else 2.4,
        )


def legend_right(ax: Axes, handles: list[Any]) -> None:
    """A legend beside the axes."""
    if handles:
        ax.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(1.01, 1.0),
            frameon=False,
            fontsize=SMALL,
            handlelength=1.4,
            borderaxespad=0.0,
        )


def title(ax: Axes, text: str, detail: str = "") -> None:
    """A title at the left, and figures in small type after it, or below it where the axes are narrow."""
    if detail and inches(ax)[0] < NARROW:
        ax.set_title(f"{text}\n{detail}", loc="left", fontsize=SMALL)
        return
    ax.set_title(text, loc="left", fontsize="medium", fontweight="bold")
    if detail:
        ax.set_title(detail, loc="right", fontsize=SMALL)


def round_step(count: int, most: int) -> int:
    """Every how many of `count` things to name, to name `most` at most: 1, 2 or 5 with zeros."""
    step = 1
    while step * most < count:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    return step


def bare(ax: Axes) -> None:
    """No frame but at the left and below."""
    ax.spines[["top", "right"]].set_visible(False)
