"""What `hf-paged soak` shows of a `SoakResult`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hf_paged.bench.soak import SoakResult

if TYPE_CHECKING:
    from rich.console import Console

MOST_PROBLEMS = 12


def print_soak(result: SoakResult, console: Console) -> None:
    """A few lines, a table of latencies, and what is wrong."""
    stats = result.stats
    console.print(
        f"[bold]{escape(result.model)}[/], {result.dtype}, {result.device}, {stats.total_blocks} blocks of "
        f"{result.options.block_size} tokens, seed {result.options.seed}",
        highlight=False,
    )
    console.print(Text(str(result.machine), "dim"))
    lines = Table(box=None, show_header=False, pad_edge=False)
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column(overflow="fold")
    lines.add_row("requests", ", ".join(f"{count:,} {reason}" for reason, count in result.outcomes.items()))
    speed = f"{result.tokens_per_second:.1f} a second"
    lines.add_row("new tokens", f"{result.new_tokens:,} in {result.seconds:.0f} s, {speed}")
    found = f"{stats.cached_tokens / max(stats.cached_tokens + stats.prompt_tokens, 1):.0%}"
    lines.add_row(
        "prompt tokens", f"{stats.prompt_tokens:,} computed, {stats.cached_tokens:,} found in blocks ({found})"
    )
    lines.add_row(
        "blocks", f"{stats.peak_blocks} of {stats.total_blocks} at the peak, {stats.preemptions:,} preemptions"
    )
    lines.add_row("at once", f"{stats.peak_running} sequences at the peak")
    lines.add_row("memory", f"{result.memory_growth / 2**20:+.1f} MiB in the second half")
    ties = f", {result.ties} of them up to a tie" if result.ties else ""
    lines.add_row("compared", f"{result.checked} requests with generate() alone{ties}")
    console.print(lines, highlight=False)
    if result.latency:
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("latency, ms")
        for column in ("p50", "p90", "p99", "max"):
            table.add_column(column, justify="right")
        for name, percentiles in result.latency.items():
            table.add_row(name, *(f"{1000 * value:,.0f}" for value in percentiles.values()))
        console.print(table, highlight=False)
    for problem in result.problems[:MOST_PROBLEMS]:
        console.print(Text(f"✗ {problem}", "bold red"))
    if len(result.problems) > MOST_PROBLEMS:
        console.print(Text(f"✗ and {len(result.problems) - MOST_PROBLEMS} more", "bold red"))
    if result.passed:
        console.print(Text("✓ Every request ended as it should, and everything was given back.", "green"))
