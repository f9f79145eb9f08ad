"""Pictures of recordings: blocks over steps, and the requests of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from hf_paged.pictures import canvas, colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hf_paged.recording import Recording, RequestRecord, Span, StepRecord

By = Literal["step", "seconds"]

LAYERS = (
    ("used by one", "#56B4E9", None),
    ("shared", "#0072B2", "////"),
    ("kept, gives way", colours.KEPT, "...."),
)
"""From below: what the legend says, colour, hatching."""
_STATES: dict[str, tuple[str, str | None, str]] = {
    # Colour, hatching, what the legend says.
    "waiting": (colours.WAITING, "....", "waiting"),
    "prompt": (colours.PROMPT, "////", "prompt"),
    "decoding": (colours.DECODING, None, "decoding"),
    "preempted": (colours.PREEMPTED, "xxxx", "preempted"),
}
_ENDS = {"error": ("X", "failed"), "cancelled": ("D", "cancelled")}
_WELL = ("o", "ended")
_THIN = 5.0
"""Points of a line's height below which hatching would be mud."""
MOST_LINES = 400


def draw_occupancy(recording: Recording, *, by: By = "step", ax: Axes | None = None) -> Axes:
    """Draw the blocks of the pool over the steps of a recording: used by one sequence, shared, and kept.

    A dashed line is what the tokens of the sequences that were recorded would fill by themselves: where it is below the
    used blocks there are slots without a token, or blocks of caches that took no step, and where it is above, sharing
    has saved the difference.

    Args:
        recording: of `hf_paged.record`.
        by: `step` or `seconds`.
        ax: where to draw; by default a new figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    ax = canvas.axes(ax, height=3.4)
    _blocks(recording, by, ax)
    peak = recording.peak
    if peak is not None:
        canvas.title(
            ax,
            "Blocks in use",
            f"at most {peak.used_blocks:,} of {peak.total_blocks:,}, at step {peak.number:,}; {_steps(recording, by)}",
        )
        x = _place(peak.number + 0.5, peak.seconds, by)
        ax.plot(x, peak.used_blocks, marker="v", color=canvas.ink(ax), markersize=6, linestyle="none", clip_on=False)
    else:
        canvas.title(ax, "Blocks in use", "no steps")
    ax.set_xlabel(_axis(by))
    canvas.legend_right(ax, _handles_of_blocks(ax, recording))
    return ax


def draw_timeline(recording: Recording, *, by: By = "step", ax: Axes | None = None) -> Axes:
    """Draw the requests of a `ContinuousBatcher`, a line for each: waiting, prompt, decoding, preempted, and how each
    ended; below them the blocks in use.

    Args:
        recording: what `record` gives for a batcher or its pool.
        by: `step` or `seconds`.
        ax: where to draw; by default a new figure. The blocks go below it.

    Raises:
        ImportError: matplotlib is not installed.
    """
    requests = recording.requests
    shown = requests[:MOST_LINES]
    lines = max(len(shown), 1)
    main_height = min(0.6 + 0.2 * lines, 5.0)
    is_new = ax is None
    ax, below = canvas.axes_above_one_another(ax, (main_height, 1.15))
    from matplotlib.collections import PatchCollection
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch, Rectangle

    height = main_height if is_new else canvas.inches(ax)[1]
    is_thin = height * canvas.INCH / lines < _THIN
    bars: dict[str, list[Rectangle]] = {}
    ends: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for line, request in enumerate(shown):
        for span in request.spans:
            left, right = _extent(span, recording, by)
            if left == right:  # it waited for no step
                continue
            tall = 0.36 if span.state == "waiting" else 0.8
            bars.setdefault(span.state, []).append(Rectangle((left, line + 0.5 - tall / 2), right - left, tall))
        if request.finish_reason is not None and request.spans:
            ends.setdefault(_ENDS.get(request.finish_reason, _WELL), []).append(
                (_extent(request.spans[-1], recording, by)[1], line + 0.5)
            )
    handles: list[Any] = []
    for state, (colour, hatch, label) in _STATES.items():
        look = {"facecolor": colour, "edgecolor": "#FFFFFF" if state == "prompt" else "#505058", "linewidth": 0}
        if hatch and not is_thin:
            look["hatch"] = hatch
        if state in bars:
            ax.add_collection(PatchCollection(bars[state], **look))
            handles.append(Patch(label=label, **look))
    size = 2.5 if is_thin else 5
    for (marker, label), points in ends.items():
        look = {"marker": marker, "color": canvas.ink(ax), "linestyle": "none"}
        ax.plot(*zip(*points, strict=True), markersize=size, clip_on=False, zorder=3, **look)
        handles.append(Line2D([], [], label=label, markersize=5, **look))
    right = recording.seconds if by == "seconds" else recording.num_steps
    ax.set(xlim=(0, max(right, 1e-9)), ylim=(lines, 0), ylabel="request")
    _name_requests(ax, shown)
    ax.tick_params(labelbottom=False)
    canvas.bare(ax)
    preempted = sum(span.state == "preempted" for request in requests for span in request.spans)
    more = f", the first {MOST_LINES} drawn" if len(requests) > len(shown) else ""
    plural = "" if len(requests) == 1 else "s"
    detail = f"{len(requests):,} request{plural}{more}, {_steps(recording, by)}"
    if preempted:
        detail += ", preempted once" if preempted == 1 else f", preempted {preempted:,} times"
    canvas.title(ax, "Requests", detail)
    canvas.legend_right(ax, handles)
    _blocks(recording, by, below)
    below.set_xlabel(_axis(by))
    canvas.legend_right(below, _handles_of_blocks(below, recording))
    return ax


def layers_of(steps: list[StepRecord]) -> list[list[int]]:
    """For each of `LAYERS`, its blocks at each step."""
    return [
        [one.used_blocks - one.shared_blocks for one in steps],
        [one.shared_blocks for one in steps],
        [one.kept_blocks for one in steps],
    ]


def _blocks(recording: Recording, by: By, ax: Axes) -> None:
    """Stacked areas of the blocks, and the blocks that the tokens need."""
    steps = recording.steps
    places = [_place(one.number, one.seconds, by) for one in steps]
    end = recording.num_steps if by == "step" else recording.seconds
    below = [0] * len(steps)
    for (_, colour, hatch), part in zip(LAYERS, layers_of(steps), strict=True):
        top = [low + count for low, count in zip(below, part, strict=True)]
        if any(part):
            ax.fill_between(
                [*places, end],
                [*below, *below[-1:]],
                [*top, *top[-1:]],
                step="post",
                facecolor=colour,
                edgecolor="#FFFFFF" if hatch == "////" else "#505058",
                hatch=hatch,
                linewidth=0,
            )
        below = top
    if steps:
        tokens = [one.held_tokens / recording.block_size for one in steps]
        ax.step([*places, end], [*tokens, tokens[-1]], where="post", color=canvas.ink(ax), linestyle="--", linewidth=1)
        undone = [one for one in steps if one.undone]
        ax.plot(
            [_place(one.number, one.seconds, by) for one in undone],
            [one.used_blocks for one in undone],
            marker="x",
            color="#D55E00",
            linestyle="none",
        )
        total = steps[-1].total_blocks
        highest = max(*below, *tokens, 1)
        if total <= 1.5 * highest:
            ax.axhline(total, color=canvas.ink(ax), linewidth=1, linestyle=":")
            highest = max(highest, total)
        ax.set(ylim=(0, highest * 1.08), xlim=(0, max(end, 1e-9)))
    ax.set_ylabel("blocks")
    from matplotlib.ticker import MaxNLocator

    ax.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    if by == "step":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    canvas.bare(ax)


def _handles_of_blocks(ax: Axes, recording: Recording) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    steps = recording.steps
    has = (True, any(one.shared_blocks for one in steps), any(one.kept_blocks for one in steps))
    handles: list[Any] = [
        Patch(
            label=label if any(has[1:]) else "in use",
            facecolor=colour,
            edgecolor="#FFFFFF" if hatch == "////" else "#505058",
            hatch=hatch,
            linewidth=0,
        )
        for (label, colour, hatch), is_there in zip(LAYERS, has, strict=True)
        if is_there
    ][::-1]
    line = {"color": canvas.ink(ax), "linewidth": 1}
    handles.append(Line2D([], [], label="tokens", linestyle="--", **line))
    if steps and ax.get_ylim()[1] >= steps[-1].total_blocks:
        handles.append(Line2D([], [], label="pool", linestyle=":", **line))
    if any(one.undone for one in steps):
        handles.append(Line2D([], [], label="undone step", marker="x", color="#D55E00", linestyle="none"))
    return handles


def _place(number: float, seconds: float, by: By) -> float:
    if by not in ("step", "seconds"):
        raise ValueError(f"by must be 'step' or 'seconds', not {by!r}")
    return number if by == "step" else seconds


def _extent(span: Span, recording: Recording, by: By) -> tuple[float, float]:
    end = recording.seconds if span.end is None else span.end
    end_step = recording.num_steps if span.end_step is None else span.end_step
    return _place(span.first_step, span.start, by), _place(end_step, end, by)


def _steps(recording: Recording, by: By) -> str:
    """How many, and in what time if that is what is drawn: over steps, the same recording gives the same picture."""
    count = f"{recording.num_steps:,} step{'' if recording.num_steps == 1 else 's'}"
    return f"{count} in {recording.seconds:.3g} s" if by == "seconds" else count


def _axis(by: By) -> str:
    return "step" if by == "step" else "seconds since the recording began"


def _name_requests(ax: Axes, requests: list[RequestRecord]) -> None:
    every = canvas.round_step(len(requests), 25)
    names = [one.label.removeprefix("request ") for one in requests]
    ax.set_yticks([line + 0.5 for line in range(0, len(names), every)], labels=names[::every])
    ax.tick_params(axis="y", length=0)
