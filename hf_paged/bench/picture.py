"""A picture of what `hf-paged bench` measured: time and waste by block size. Needs matplotlib."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from hf_paged.bench.block_sizes import STATIC, WORTH, BlockSizesResult, block_waste, gain, gains, padded_waste
from hf_paged.bench.decode import DYNAMIC
from hf_paged.pictures.colours import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Lines are told apart by markers and dashes, too, as all colours are grey to some.
STYLES = (
    {"color": PALETTE[6], "marker": "o", "linestyle": "-"},
    {"color": PALETTE[5], "marker": "s", "linestyle": "--"},
    {"color": PALETTE[2], "marker": "^", "linestyle": "-."},
    {"color": PALETTE[3], "marker": "D", "linestyle": ":"},
    {"color": PALETTE[0], "marker": "v", "linestyle": "--"},
    {"color": PALETTE[1], "marker": "P", "linestyle": "-"},
)


def save_block_sizes(result: BlockSizesResult, title: str, path: Path | str) -> None:
    """Write two panels to a .png or .svg file: times with their quartiles, and the waste of ragged rows."""
    from matplotlib.figure import Figure  # no pyplot: nothing of the caller's matplotlib changes

    figure = Figure(figsize=(9, 4.5), layout="constrained", facecolor="white")
    panels = figure.subplots(1, 2)
    for axes, draw in zip(panels, (_draw_times, _draw_waste), strict=True):
        heading, note = draw(result, axes)
        axes.set_title(heading, fontsize=10, loc="left")
        axes.set_xlabel(f"tokens a block\n{note}", fontsize=9)
        axes.set_xticks(range(len(result.sizes)), [str(size) for size in result.sizes])
        axes.set_xlim(-0.4, len(result.sizes) - 0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=9)
        axes.legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=10, x=0.01, horizontalalignment="left")
    verdict = textwrap.fill(result.recommendation.text, 120)
    figure.supxlabel(verdict, fontsize=9.5, x=0.01, horizontalalignment="left")
    figure.savefig(path, dpi=160)


def _draw_times(result: BlockSizesResult, axes: Axes) -> tuple[str, str]:
    """Times relative to the smallest blocks, over all points, so that decode and prefill share an axis."""
    measured = {
        "decode": [point.steps for point in result.points],
        "prefill": [prefill.comparison for prefill in result.prefills],
    }
    smallest = result.sizes[0]
    lowest, highest = 1 - 2 * WORTH, 1 + 2 * WORTH  # no less, lest chance look large
    others: dict[str, list[str]] = {"DynamicCache": [], "StaticCache": []}
    if result.without_static:
        del others["StaticCache"]
    for index, (phase, comparisons) in enumerate(measured.items()):
        found = gains(comparisons, result.sizes).values()  # for the smallest: what chance does
        times = [1 / ratio.median for ratio in found]
        lows = [1 / ratio.quartiles[1] for ratio in found]
        highs = [1 / ratio.quartiles[0] for ratio in found]
        bars = [
            [time - low for time, low in zip(times, lows, strict=True)],
            [high - time for time, high in zip(times, highs, strict=True)],
        ]
        places = [place + 0.12 * (index - 0.5) for place in range(len(times))]  # so that bars lie beside each other
        axes.errorbar(places, times, yerr=bars, capsize=3, linewidth=1.4, markersize=5, label=phase, **STYLES[index])
        lowest, highest = min(lowest, *lows), max(highest, *highs)
        for texts, side in zip(others.values(), (DYNAMIC, STATIC), strict=False):
            texts.append(f"{phase} {1 / gain(comparisons, side, str(smallest)).median:.2f}")
    axes.axhspan(1 - WORTH, 1 + WORTH, color="#EEEEEE", zorder=0, label=f"within {WORTH:.0%}")
    margin = 0.05 * (highest - lowest)
    axes.set_ylim(lowest - margin, highest + 4 * margin)  # with room for the legend
    return (
        f"Time relative to blocks of {smallest}: lower is faster",
        f"bars: quartiles; {smallest} was measured twice, and the difference is chance\n"
        + "\n".join(f"{name}: {', '.join(texts)}" for name, texts in others.items()),
    )


def _draw_waste(result: BlockSizesResult, axes: Axes) -> tuple[str, str]:
    for index, length in enumerate(result.lengths):
        percent = [100 * block_waste(length, size) for size in result.sizes]
        label = f"rows of {length // 2:,} to {length * 3 // 2:,} tokens"
        axes.plot(range(len(percent)), percent, markersize=5, linewidth=1.4, label=label, **STYLES[2 + index % 4])
    axes.set_ylim(bottom=0)
    padded = max(padded_waste(length) for length in result.lengths)
    return "Slots without a token, %", f"padded to the longest row, as in DynamicCache: {padded:.0%}"
