"""What `hf-paged bench` shows: a table for each part of a `SuiteResult`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hf_paged.bench import compiled
from hf_paged.bench.batching import BATCH, PADDED, BatchingResult, CapacityResult
from hf_paged.bench.beams import BeamResult
from hf_paged.bench.block_sizes import (
    AGAIN,
    STATIC,
    BlockSizesResult,
    Verdict,
    block_waste,
    padded_waste,
)
from hf_paged.bench.compiled import CompiledResult
from hf_paged.bench.decode import DYNAMIC, PAGED, DecodeResult, PointResult
from hf_paged.bench.harness import Comparison, Ratio, Timing
from hf_paged.bench.host import LENGTH, ROWS, HostResult
from hf_paged.bench.memory import TARGET, MemoryResult
from hf_paged.bench.prefill import PrefillResult
from hf_paged.bench.suite import AttentionResult, SuiteResult

if TYPE_CHECKING:
    from rich.console import Console


def print_suite(result: SuiteResult, console: Console) -> None:
    """A table for each part."""
    console.print(
        f"[bold]{escape(result.model)}[/], {result.dtype}, {result.device}, blocks of {result.block_size} tokens",
        highlight=False,
    )
    console.print(Text(str(result.machine), "dim"))
    if result.attention:
        _print_attention(result.attention, console)
    if result.prefill:
        _print_prefill(result.prefill, console)
    if result.decode:
        _print_decode(result.decode, console)
    if result.compiled:
        _print_compiled(result.compiled, console)
    _print_error(result.compiled_error, console)
    if result.memory:
        _print_memory(result.memory, console)
    if result.beams:
        _print_beams(result.beams, console)
    for batching in result.batching:
        _print_batching(batching, console)
    if result.capacity:
        _print_capacity(result.capacity, console)
    if result.blocks:
        _print_blocks(result.blocks, console)
    if result.host:
        _print_host(result.host, console)
    if result.launch:
        _print_launch(result.launch, console)
    for part, reason in result.left_out.items():
        _print_error(f"{part} is left out: {reason}", console)
    for part, reason in result.failures.items():
        console.print(f"\n[red]✗ {part} broke off: {escape(reason)}[/]", highlight=False)


def _print_attention(results: Sequence[AttentionResult], console: Console) -> None:
    first = results[0]
    columns = ("rows x context", "dynamic, us", "paged, us", "times as fast", "GB/s: paged", "plain read")
    table = _table(
        f"One attention layer in decode: {first.heads} heads, {first.kv_heads} for KV, of {first.head_dim}", columns
    )
    for result in results:
        figures = result.figures
        table.add_row(
            str(result.point),
            f"{figures['cat_sdpa']:,.0f}",
            f"{figures['paged']:,.0f}",
            f"[bold]{figures['speedup']:.2f}[/]",
            *(f"{figures['bytes'] / figures[name] / 1e3:.1f}" for name in ("decode", "read")),
        )
    console.print(table, highlight=False)
    console.print("[dim]Medians over rounds; keys and values come from memory, not from a CPU cache.[/]")


def _print_prefill(results: Sequence[PrefillResult], console: Console) -> None:
    columns = ("rows x tokens", "dynamic, ms", "paged, ms", "times as fast", "tokens a second, paged")
    table = _table("Reading prompts with the model", columns)
    for result in results:
        timings = result.comparison.timings
        table.add_row(
            str(result.point),
            _milliseconds(timings[DYNAMIC]),
            _milliseconds(timings[PAGED]),
            _times(result.comparison.ratio(PAGED)),
            f"{result.point.batch * result.point.length / timings[PAGED].median:,.0f}",
            style=None if result.agrees else "red",
        )
    console.print(table, highlight=False)
    _print_disagreements(results, console)


def _print_decode(results: Sequence[DecodeResult], console: Console) -> None:
    columns = ("rows x context", "dynamic, ms", "paged, ms", "times as fast", "GB/s: dynamic", "paged", "plain read")
    table = _table("One decode step of the model", columns)
    for result in results:
        timings = result.comparison.timings
        table.add_row(
            str(result.point),
            _milliseconds(timings[DYNAMIC]),
            _milliseconds(timings[PAGED]),
            _times(result.comparison.ratio(PAGED)),
            *(_rate(result.context_bandwidth(name)) for name in (DYNAMIC, PAGED)),
            f"{result.read_bandwidth / 1e9:.1f}",
            style=None if result.agrees else "red",
        )
    console.print(table, highlight=False)
    console.print(
        "[dim]Dynamic is DynamicCache with sdpa, paged is PagedCache with paged attention. Times are medians ± the "
        "distance between the quartiles; ratios are medians (quartiles) over the rounds. GB/s: the bytes of keys and "
        "values over the time that the context adds to a step (– if that is less than the spread), and what the "
        "machine reads of as many bytes in one piece.[/]",
        highlight=False,
    )
    _print_disagreements(results, console)


def _print_compiled(results: Sequence[CompiledResult], console: Console) -> None:
    columns = ("rows x context", "dynamic", "static*", "paged", "paged*", "as fast as dynamic", "as static*")
    table = _table("One decode step as generate() runs it, ms; * compiled", columns)
    for result in results:
        comparison = result.comparison
        sides = (compiled.DYNAMIC, compiled.STATIC, compiled.PAGED_EAGER, compiled.PAGED)
        table.add_row(
            str(result.point),
            *(f"{comparison.timings[side].median * 1e3:.1f}" for side in sides),
            *(_times(comparison.ratio(compiled.PAGED, side)) for side in (compiled.DYNAMIC, compiled.STATIC)),
            style=None if result.agrees else "red",
        )
    console.print(table, highlight=False)
    graphs = ", ".join(str(result.graphs) for result in results)
    linears = {r.point.batch: f"{r.linear_seconds * 1e3:.1f} ms at batch {r.point.batch}" for r in results}
    console.print(
        f"[dim]Medians, and medians (quartiles) of the ratios over the rounds. StaticCache is as long as its rows "
        f"become, which it must be told. New graphs of PagedCache at these points, in turn: {graphs}. All linear "
        f"layers by themselves: {', '.join(linears.values())}.[/]",
        highlight=False,
    )
    _print_disagreements(results, console)


def _print_disagreements(results: Sequence[PointResult], console: Console) -> None:
    for result in results:
        if not result.agrees:
            console.print(
                f"[red]✗ at {result.point} the logits of the sides differ by {result.logit_difference:.2g} of the "
                f"largest (allowed: {result.tolerance:.2g})[/]"
            )


def _print_batching(result: BatchingResult, console: Console) -> None:
    columns = ("", "seconds", "new tokens a second", f"times as fast as {BATCH}", f"as {PADDED}")
    table = _table(result.workload.name, columns)
    timings = result.comparison.timings
    for name, timing in timings.items():
        ratios = [
            "" if name == other or other not in timings else f"{result.comparison.ratio(name, other).median:.2f}"
            for other in (BATCH, PADDED)
        ]
        table.add_row(name, f"{timing.median:.1f}", f"{result.tokens_per_second(name):.1f}", *ratios)
    console.print(table)
    console.print(f"{result.agrees:.0%} of the requests have the tokens of {PADDED}.", highlight=False)
    if result.left_out:
        _print_error(f"{BATCH} is left out, as it does not serve this model: {result.left_out}", console)


def _print_capacity(result: CapacityResult, console: Console) -> None:
    columns = ("", "requests at once", "new tokens a second")
    table = _table(f"{result.num_requests} requests in the memory of {result.budget_tokens:,} tokens", columns)
    table.add_row(
        f"{result.max_length:,} tokens reserved for each",
        str(result.reserved_requests),
        f"{result.reserved_tokens_per_second:.1f}",
    )
    table.add_row("blocks", str(result.paged_requests), f"{result.paged_tokens_per_second:.1f}")
    console.print(table)


def _print_blocks(result: BlockSizesResult, console: Console) -> None:
    smallest = str(result.sizes[0])
    paddings = {DYNAMIC: "DynamicCache"} | ({} if result.without_static else {STATIC: "StaticCache"})
    sides = {smallest: smallest, AGAIN: f"{smallest} again"} | {str(size): str(size) for size in result.sizes[1:]}

    def add_row(table: Table, comparison: Comparison, side: str, *cells: str) -> None:
        ratio = "" if side == smallest else _times(comparison.ratio(side, smallest))
        name = (sides | paddings)[side]
        table.add_row(
            name, _milliseconds(comparison.timings[side]), ratio, *cells, style="dim" if side == AGAIN else None
        )

    for found in result.points:
        columns = ("tokens a block", "decode, ms", f"as fast as {smallest}", "KV, MB", "waste")
        table = _table(f"Block sizes: decode steps of {found.point}", columns)
        length = found.point.length
        waste = {str(size): block_waste(length, size) for size in result.sizes} | {AGAIN: None}
        for side in (*sides, *paddings):
            share = waste.get(side, padded_waste(length))
            cells = () if share is None else (f"{found.kv_bytes[side] / 1e6:,.1f}", f"{share:.1%}")
            add_row(table, found.steps, side, *cells)
        console.print(table, highlight=False)
    for prefill in result.prefills:
        columns = ("tokens a block", "prefill, ms", f"as fast as {smallest}")
        table = _table(f"Block sizes: prompts of {prefill.point}", columns)
        for side in (*sides, *paddings):
            add_row(table, prefill.comparison, side)
        console.print(table, highlight=False)
    console.print(
        f"[dim]Medians ± the distance between the quartiles, and medians (quartiles) of the ratios to blocks of "
        f"{smallest} over the rounds; what a second cache with such blocks gives is chance. KV: bytes at the end of "
        "the decode steps. Waste: slots without a token, for rows from half the length to half as much again; "
        "DynamicCache and StaticCache (not compiled) pad them to the longest.[/]",
        highlight=False,
    )
    if result.without_static:
        _print_error(f"StaticCache is left out, as this model does not run with it: {result.without_static}", console)
    colour = {Verdict.STAY: "green", Verdict.CHANGE: "cyan", Verdict.UNSURE: "yellow"}
    recommendation = result.recommendation
    console.print(f"\n[bold {colour[recommendation.verdict]}]{escape(recommendation.text)}[/]", highlight=False)
    _print_disagreements((*result.points, *result.prefills), console)


def _print_host(result: HostResult, console: Console) -> None:
    names = (f"beginning a step of {ROWS} x {LENGTH:,}", "the same, compiled", "a layer, 1 row", "of DynamicCache")
    table = _table("Host time of decode steps on a CPU, us", (*names, "difference"))
    table.add_row(
        *(f"{value:.1f}" for value in (result.begin_us, result.begin_extended_us, result.layer_us)),
        *(f"{value:.1f}" for value in (result.dynamic_layer_us, result.layer_difference_us)),
    )
    console.print(table, highlight=False)


def _print_error(error: str | None, console: Console) -> None:
    if error:
        console.print(f"\n[dim]{escape(error)}[/]", highlight=False)


def _print_memory(result: MemoryResult, console: Console) -> None:
    columns = ("", "MB", "above the tokens")
    table = _table(
        f"Memory of {len(result.lengths)} rows of {min(result.lengths)} to {max(result.lengths):,} tokens", columns
    )
    table.add_row(f"{result.tokens:,} real tokens", f"{result.token_bytes / 1e6:,.1f}", "")
    good = "green" if result.paged_overhead <= TARGET else "yellow"
    paged, dynamic = result.paged_bytes / 1e6, result.dynamic_bytes / 1e6
    table.add_row("PagedCache, blocks in use at the peak", f"{paged:,.1f}", f"[{good}]{result.paged_overhead:.1%}[/]")
    table.add_row("DynamicCache", f"{dynamic:,.1f}", f"{result.dynamic_overhead:.1%}")
    console.print(table, highlight=False)


def _print_beams(result: BeamResult, console: Console) -> None:
    table = _table(
        f"Beam search: {result.prompts} prompts of {result.length:,} tokens, {result.beams} beams, "
        f"{result.new_tokens} new tokens",
        ("", "generate(), s", "KV at the peak, MB"),
    )
    timings = result.comparison.timings
    table.add_row("DynamicCache", f"{timings[DYNAMIC].median:.1f}", f"{result.dynamic_bytes / 1e6:,.0f}")
    ratio = _times(result.comparison.ratio(PAGED))
    paged = f"{result.paged_bytes / 1e6:,.0f} ({result.memory_share:.2f} of it)"
    table.add_row("PagedCache", f"{timings[PAGED].median:.1f}, {ratio} times as fast", paged)
    console.print(table, highlight=False)
    if not result.agrees:
        console.print("[red]✗ the tokens of both differ[/]")


def _print_launch(result: Mapping[str, float | str], console: Console) -> None:
    if "error" in result:
        _print_error(str(result["error"]), console)
        return
    columns = ("storing a step", "decode", "decode in several pieces")
    table = _table("Host time of a call of the Triton kernels, us, without the driver's own part", columns)
    table.add_row(*(f"{result[name]:.1f}" for name in ("write_us", "decode_us", "decode_split_us")))
    console.print(table, highlight=False)


def _table(title: str, columns: Sequence[str]) -> Table:
    """Numbers stand to the right; what a row is called has a column without a name."""
    table = Table(
        title=f"\n{title}", title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False
    )
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    return table


def _milliseconds(timing: Timing) -> str:
    return f"{timing.median * 1e3:.1f} ± {timing.iqr * 1e3:.1f}"


def _times(ratio: Ratio) -> str:
    low, high = ratio.quartiles
    return f"[bold]{ratio.median:.2f}[/] ({low:.2f}-{high:.2f})"


def _rate(bytes_per_second: float | None) -> str:
    return "–" if bytes_per_second is None else f"{bytes_per_second / 1e9:.1f}"
