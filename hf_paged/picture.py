"""Pictures of a pool: every block as a mark, by the row that holds it."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_paged.cache import PagedCache

MARKS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
FREE, SHARED, OTHER = "·", "#", "?"


def owners(cache: PagedCache, group: int = 0) -> list[int | str]:
    """What each block is, up to the last in use: the number of the row that holds it alone, `SHARED` where rows share
    it, `FREE`, or `OTHER` where another cache on the pool holds it.

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
    found: list[int | str] = []
    for block in range(allocator.high_water):
        rows = holders.get(block)
        if rows is None:
            found.append(OTHER if allocator.references(block) else FREE)
        else:
            found.append(rows[0] if len(rows) == allocator.references(block) == 1 else SHARED)
    while found and found[-1] == FREE:
        found.pop()
    return found


def text_map(cache: PagedCache, width: int = 64) -> str:
    """The blocks as lines of marks, `width` to a line, with a legend; one such map for each group of layers."""
    maps = []
    for group, layers in enumerate(cache.pool.groups):
        marks = [MARKS[what % len(MARKS)] if isinstance(what, int) else what for what in owners(cache, group)]
        lines = ["".join(marks[start : start + width]) for start in range(0, len(marks), width)]
        name = f"{layers.name}: " if len(cache.pool.groups) > 1 else ""
        others = f", {OTHER} of another cache" if OTHER in marks else ""
        lines.append(f"{name}{_count(cache, group)}; a letter a row, {SHARED} shared, {FREE} free{others}")
        maps.append("\n".join(lines))
    return "\n".join(maps)


def _count(cache: PagedCache, group: int) -> str:
    if not cache.pool.is_sized:
        return "no blocks in use yet"
    allocator = cache.pool.allocators[group]
    return f"{allocator.num_used:,} of {allocator.num_blocks:,} blocks in use"


def html_map(cache: PagedCache, limit: int = 2048) -> str:
    """The same as HTML for Jupyter: one small square a block, its row in the tooltip. No scripts.

    Args:
        limit: blocks to draw at most; the rest is told as a number.
    """
    stats = cache.stats()
    maps = []
    for group, layers in enumerate(cache.pool.groups):
        found = owners(cache, group)
        squares = "".join(_square(block, what) for block, what in enumerate(found[:limit]))
        more = f"<div>and {len(found) - limit:,} more</div>" if len(found) > limit else ""
        maps.append(f"<div>{html.escape(layers.name)}: {_count(cache, group)}</div>{squares}{more}")
    caption = (
        f"{cache!r}: {stats.shared_blocks:,} shared, waste {stats.waste:.1%}; reserved {stats.reserved_bytes:,} B, "
        f"in use {stats.used_bytes:,} B, tokens {stats.token_bytes:,} B"
    )
    return (
        f'<div style="font-family:monospace;font-size:12px;line-height:11px;max-width:720px">'
        f'<div style="line-height:16px;margin-bottom:4px">{html.escape(caption)}</div>{"".join(maps)}</div>'
    )


def _square(block: int, what: int | str) -> str:
    if isinstance(what, int):
        hue = what * 137 % 360  # neighbours far apart on the colour wheel
        fill, line, text = f"hsl({hue} 65% 60%)", f"hsl({hue} 65% 45%)", f"row {what}"
    else:
        fill, line, text = {
            FREE: ("transparent", "#bbb", "free"),
            SHARED: ("#444", "#444", "shared"),
            OTHER: ("#ddd", "#ccc", "another cache"),
        }[what]
    style = f"display:inline-block;width:9px;height:9px;margin:1px;background:{fill};border:1px solid {line}"
    return f'<span title="block {block}: {text}" style="{style}"></span>'
