"""Pictures of a pool: every block as a mark, by the row that holds it."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_paged.cache import PagedCache

MARKS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
FREE, SHARED, OTHER = "·", "#", "?"


def owners(cache: PagedCache, group: int = 0) -> list[str]:
    """One mark for each block up to the highest in use: the row's letter, `#` where rows share it, `·` where free, and
    `?` where another cache on the pool holds it.

    Args:
        group: which group of layers; most models have one.
    """
    pool = cache.pool
    if not pool.is_sized:
        return []
    tables = list(cache.block_tables.values())[group]
    holders: dict[int, list[int]] = {}
    for row, blocks in enumerate(tables):
        for block in blocks:
            holders.setdefault(block, []).append(row)
    allocator = pool.allocators[group]
    marks = []
    for block in range(allocator.num_blocks):
        if block >= allocator.high_water:
            break
        rows = holders.get(block)
        if rows is None:
            marks.append(OTHER if allocator.references(block) else FREE)
        else:
            marks.append(MARKS[rows[0] % len(MARKS)] if len(rows) == allocator.references(block) == 1 else SHARED)
    return marks


def text_map(cache: PagedCache, width: int = 64) -> str:
    """The blocks as lines of marks, `width` to a line, with a legend."""
    marks = owners(cache)
    while marks and marks[-1] == FREE:
        marks.pop()
    stats = cache.stats()
    lines = ["".join(marks[start : start + width]) for start in range(0, len(marks), width)]
    legend = (
        f"{stats.used_blocks:,} of {stats.total_blocks:,} blocks in use; a letter a row, {SHARED} shared, {FREE} free"
    )
    return "\n".join([*lines, legend])


def html_map(cache: PagedCache, limit: int = 2048) -> str:
    """The same as HTML for Jupyter: one small square a block, its row in the tooltip. No scripts.

    Args:
        limit: blocks to draw at most; the rest is told as a number.
    """
    marks = owners(cache)
    while marks and marks[-1] == FREE:
        marks.pop()
    stats = cache.stats()
    squares = []
    for block, mark in enumerate(marks[:limit]):
        if mark == FREE:
            style, what = "background:transparent;border:1px solid #bbb", "free"
        elif mark == SHARED:
            style, what = "background:#444;border:1px solid #444", "shared"
        elif mark == OTHER:
            style, what = "background:#ddd;border:1px solid #ccc", "another cache"
        else:
            row = MARKS.index(mark)
            style = f"background:hsl({row * 137 % 360} 65% 60%);border:1px solid hsl({row * 137 % 360} 65% 45%)"
            what = f"row {row}"
        squares.append(
            f'<span title="block {block}: {what}" style="display:inline-block;width:9px;height:9px;margin:1px;{style}">'
            "</span>"
        )
    more = f"<div>and {len(marks) - limit:,} more</div>" if len(marks) > limit else ""
    caption = (
        f"{cache!r}: {stats.used_blocks:,} of {stats.total_blocks:,} blocks in use, {stats.shared_blocks:,} shared, "
        f"waste {stats.waste:.1%}; reserved {stats.reserved_bytes:,} B, in use {stats.used_bytes:,} B, "
        f"tokens {stats.token_bytes:,} B"
    )
    return (
        f'<div style="font-family:monospace;font-size:12px;line-height:11px;max-width:720px">'
        f'<div style="line-height:16px;margin-bottom:4px">{html.escape(caption)}</div>{"".join(squares)}{more}</div>'
    )
