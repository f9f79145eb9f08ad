"""What a notebook shows for a cache, a pool, a batcher or a recording at the end of a cell.

Plain HTML: no scripts and nothing to fetch. A block is a small square with the letter of its sequence, which is a text
map where a viewer takes the styles away. Text has the colour of its surroundings, so it is readable in dark themes.
"""

from __future__ import annotations

import html
from collections import Counter
from typing import TYPE_CHECKING

from hf_paged.pictures import colours
from hf_paged.pictures.blocks import BlockMap, State, block_maps, block_tables
from hf_paged.pictures.over_time import LAYERS, layers_of
from hf_paged.pictures.text import MARKS, count, last_held, letter, mark
from hf_paged.sizes import format_size

if TYPE_CHECKING:
    from hf_paged.batching.batcher import ContinuousBatcher
    from hf_paged.cache import PagedCache
    from hf_paged.pool import BlockPool
    from hf_paged.recording import Recording, StepRecord

MOST_BLOCKS = 2048
MOST_NAMES = 14
"""Sequences that the legend names."""
MOST_REQUESTS = 20
MOST_TABLES = 16
MOST_ENTRIES = 48
MOST_STEPS = 256
WIDTH, HEIGHT = 600, 110
"""Pixels of the blocks over steps."""

_CLASSES = {State.SHARED: "s", State.OTHER: "o", State.KEPT: "k", State.FREE: "f"}
_STYLE = (
    "<style>"
    ".hf-paged{font:12px/1.4 system-ui,sans-serif;max-width:760px}"
    ".hf-paged .m{font:9px/12px ui-monospace,monospace;margin:3px 0 6px}"
    ".hf-paged .b{display:inline-block;width:12px;height:12px;margin:0 2px 2px 0;border-radius:2px;text-align:center;"
    "vertical-align:top;overflow:hidden;box-sizing:border-box}"
    ".hf-paged .f{border:1px solid #8888}"
    f".hf-paged .s{{background:{colours.SHARED};color:#fff}}"
    f".hf-paged .o{{background:{colours.OTHER};color:#000}}"
    ".hf-paged .k{border:1px dashed #888;background:repeating-linear-gradient(45deg,#8886 0 2px,transparent 2px 4px)}"
    + "".join(
        f".hf-paged .c{index}{{background:{colour};color:{colours.ink_on(colour)}}}"
        for index, colour in enumerate(colours.PALETTE)
    )
    + ".hf-paged td,.hf-paged th{padding:1px 8px;text-align:right}"
    "</style>"
)


def html_of_cache(cache: PagedCache) -> str:
    stats = cache.stats()
    caption = (
        f"{cache!r}: {stats.shared_blocks:,} shared, waste {stats.waste:.1%}; reserved "
        f"{format_size(stats.reserved_bytes)}, in use {format_size(stats.used_bytes)}, tokens "
        f"{format_size(stats.token_bytes)}"
    )
    return _whole(html.escape(caption), _maps(cache) + _tables(cache))


def html_of_pool(pool: BlockPool) -> str:
    return _whole(html.escape(f"{pool!r}: {format_size(pool.reserved_bytes)} reserved"), _maps(pool))


def html_of_batcher(batcher: ContinuousBatcher) -> str:
    stats = batcher.stats()
    facts = [f"{getattr(stats, name):,} {name}" for name in ("waiting", "running", "finished", "failed", "cancelled")]
    facts += [
        f"{stats.preemptions:,} preemptions",
        f"{stats.steps:,} steps",
        f"{stats.new_tokens:,} new tokens",
        f"{stats.tokens_per_second:,.1f} tokens per second",
    ]
    return _whole(f"ContinuousBatcher: {', '.join(facts)}", _requests(batcher) + _maps(batcher) + _tables(batcher))


def html_of_recording(recording: Recording) -> str:
    ends = Counter(one.finish_reason or "not ended" for one in recording.requests)
    requests = f"<div>requests: {', '.join(f'{count:,} {reason}' for reason, count in ends.items())}</div>"
    return _whole(html.escape(repr(recording)), (requests if ends else "") + _occupancy(recording))


def _whole(caption: str, body: str) -> str:
    return f'{_STYLE}<div class="hf-paged"><div>{caption}</div>{body}</div>'


def _maps(target: PagedCache | BlockPool | ContinuousBatcher) -> str:
    return "".join(_map(blocks) for blocks in block_maps(target))


def _map(blocks: BlockMap) -> str:
    shown = min(last_held(blocks), MOST_BLOCKS)
    squares = "".join(
        f'<span class="b {_class(blocks, block)}" title="{html.escape(blocks.describe(block))}">'
        f"{mark(blocks, block)}</span>"
        for block in range(shown)
    )
    more = last_held(blocks) - shown
    return (
        f"<div>{html.escape(blocks.group)}: {count(blocks)}</div>"
        + (f'<div class="m">{squares}{f" and {more:,} more" if more else ""}</div>' if squares else "")
        + (f'<div class="m">{_legend(blocks)}</div>' if squares else "")
    )


def _class(blocks: BlockMap, block: int) -> str:
    owner = blocks.owners[block]
    return _CLASSES[blocks.states[block]] if owner is None else f"c{owner % len(colours.PALETTE)}"


def _legend(blocks: BlockMap) -> str:
    owners = sorted({owner for owner in blocks.owners if owner is not None})
    parts = [
        f'<b class="b c{owner % len(colours.PALETTE)}">{letter(owner)}</b> {html.escape(blocks.labels[owner])}'
        for owner in owners[:MOST_NAMES]
    ]
    if len(owners) > MOST_NAMES:
        parts.append(f"and {len(owners) - MOST_NAMES:,} more")
    parts += [
        f'<b class="b {name}">{MARKS[state]}</b> {blocks.name(state)}'
        for state, name in _CLASSES.items()
        if state in blocks.states
    ]
    return " &ensp;".join(parts)


def _requests(batcher: ContinuousBatcher) -> str:
    running = batcher.running
    if not running:
        return ""
    lines = [
        "<tr>"
        + "".join(
            f"<td>{value}</td>"
            for value in (
                html.escape(f"{s.handle.index}" + (f".{s.handle.sample}" if s.handle.sample else "")),
                f"{s.num_prompt:,}",
                f"{s.num_new:,} of {s.rules.max_length - s.num_prompt:,}",
                sum(len(table.blocks) for table in s.tables),
                s.preemptions,
            )
        )
        + "</tr>"
        for s in running[:MOST_REQUESTS]
    ]
    more = f"<div>and {len(running) - MOST_REQUESTS:,} more</div>" if len(running) > MOST_REQUESTS else ""
    head = "".join(f"<th>{name}</th>" for name in ("request", "prompt", "new tokens", "blocks", "preemptions"))
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>{more}"


def _tables(target: PagedCache | ContinuousBatcher) -> str:
    """The block tables as lines, folded up."""
    return "".join(_tables_of_group(group, tables) for group, tables in block_tables(target).items())


def _tables_of_group(group: str, tables: dict[str, list[int]]) -> str:
    if not any(tables.values()):
        return ""
    held = Counter(block for blocks in tables.values() for block in blocks)
    lines = []
    for label, blocks in list(tables.items())[:MOST_TABLES]:
        entries = [f"<u>{block}</u>" if held[block] > 1 else f"{block}" for block in blocks[:MOST_ENTRIES]]
        if len(blocks) > MOST_ENTRIES:
            entries.append(f"and {len(blocks) - MOST_ENTRIES:,} more")
        lines.append(f"<div>{html.escape(label)}: {' '.join(entries)}</div>")
    if len(tables) > MOST_TABLES:
        lines.append(f"<div>and {len(tables) - MOST_TABLES:,} more</div>")
    shared = ", shared blocks underlined" if len(held) < held.total() else ""
    name = f"block tables: {html.escape(group)}{shared}"
    return f"<details><summary>{name}</summary>{''.join(lines)}</details>"


def _occupancy(recording: Recording) -> str:
    """The blocks over the steps, as `draw_occupancy` has them."""
    steps = _thinned(recording.steps)
    if not steps:
        return ""
    layers, tokens = layers_of(steps), [one.held_tokens / recording.block_size for one in steps]
    highest = max(*map(sum, zip(*layers, strict=True)), *tokens, 1)
    places = [one.number * WIDTH / recording.num_steps for one in steps] + [WIDTH]

    def stairs(heights: list[float]) -> list[str]:
        """From left to right, `x y` of both ends of each stair."""
        ends = zip(places, places[1:], heights, strict=False)
        return [f"{x:.4g} {HEIGHT * (1 - y / highest):.4g}" for left, right, y in ends for x in (left, right)]

    shapes, legend, below = [], [], [0.0] * len(steps)
    for (name, colour, _), part in zip(LAYERS, layers, strict=True):
        top = [low + count for low, count in zip(below, part, strict=True)]
        if any(part):
            outline = "L".join(stairs(top) + stairs(below)[::-1])
            shapes.append(f'<path fill="{colour}" d="M{outline}Z"><title>{name}</title></path>')
            legend.append(f'<b class="b" style="background:{colour}"></b> {name}')
        below = top
    line = f'<path fill="none" stroke="currentColor" stroke-dasharray="4 2" d="M{"L".join(stairs(tokens))}"/>'
    peak = recording.peak
    told = f"at most {peak.used_blocks:,} of {peak.total_blocks:,} blocks, at step {peak.number:,}"
    return (
        f'<svg role="img" aria-label="blocks over steps: {told}" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 -1 {WIDTH} {HEIGHT + 2}" style="max-width:100%">{"".join(shapes)}{line}</svg>'
        f"<div>steps 0 to {recording.num_steps - 1:,}: {told}</div>"
        f"<div>from below: {' &ensp;'.join(legend)} &ensp;dashed: what the tokens would fill</div>"
    )


def _thinned(steps: list[StepRecord]) -> list[StepRecord]:
    """The one with most blocks of every few."""
    every = -(-len(steps) // MOST_STEPS)
    groups = [steps[start : start + every] for start in range(0, len(steps), max(every, 1))]
    return [max(group, key=lambda one: one.used_blocks) for group in groups]
