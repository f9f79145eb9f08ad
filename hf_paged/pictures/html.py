"""What a notebook shows for a cache, a pool or a batcher at the end of a cell.

Plain HTML: no scripts and nothing to fetch. A block is a small square with the letter of its sequence, which is a text
map where a viewer takes the styles away. Text has the colour of its surroundings, so it is readable in dark themes.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from hf_paged.pictures import colours
from hf_paged.pictures.blocks import BlockMap, State, block_maps
from hf_paged.pictures.text import MARKS, count, last_held, letter, mark

if TYPE_CHECKING:
    from hf_paged.batching.batcher import ContinuousBatcher
    from hf_paged.cache import PagedCache
    from hf_paged.pool import BlockPool

MOST_BLOCKS = 2048
MOST_NAMES = 14
"""Sequences that the legend names."""
MOST_REQUESTS = 20

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
        f"{cache!r}: {stats.shared_blocks:,} shared, waste {stats.waste:.1%}; reserved {stats.reserved_bytes:,} B, "
        f"in use {stats.used_bytes:,} B, tokens {stats.token_bytes:,} B"
    )
    return _whole(html.escape(caption), _maps(cache))


def html_of_pool(pool: BlockPool) -> str:
    return _whole(html.escape(f"{pool!r}: {pool.reserved_bytes:,} B reserved"), _maps(pool))


def html_of_batcher(batcher: ContinuousBatcher) -> str:
    stats = batcher.stats()
    facts = [f"{getattr(stats, name):,} {name}" for name in ("waiting", "running", "finished", "failed", "cancelled")]
    facts += [
        f"{stats.preemptions:,} preemptions",
        f"{stats.steps:,} steps",
        f"{stats.new_tokens:,} new tokens",
        f"{stats.tokens_per_second:,.1f} tokens per second",
    ]
    return _whole(f"ContinuousBatcher: {', '.join(facts)}", _requests(batcher) + _maps(batcher))


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
        f'<b class="b c{owner % len(colours.PALETTE)}">{letter(owner)}</b>{html.escape(blocks.labels[owner])}'
        for owner in owners[:MOST_NAMES]
    ]
    if len(owners) > MOST_NAMES:
        parts.append(f"and {len(owners) - MOST_NAMES:,} more")
    parts += [
        f'<b class="b {name}">{MARKS[state]}</b>{blocks.name(state)}'
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
