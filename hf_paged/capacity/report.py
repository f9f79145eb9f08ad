"""What `hf-paged plan` shows of a `CapacityPlan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hf_paged.capacity.planning import CapacityPlan, Fit, LengthsPlan
from hf_paged.sizes import format_size

if TYPE_CHECKING:
    from rich.console import Console


def print_plan(plan: CapacityPlan, console: Console, binary: bool = True) -> None:
    """Tables of what a token and a request take, and of how many fit.

    Args:
        binary: sizes are shown in GiB and the like, else in GB and the like.
    """

    def size(nbytes: float) -> str:
        return format_size(nbytes, binary)

    _print_model(plan, console, size)
    _print_ways(plan, console, size)
    _print_block_sizes(plan, console, size)
    if plan.lengths is not None:
        _print_lengths(plan, plan.lengths, console, size)
    if plan.num_blocks:
        block_size = "" if plan.blocks.block_size == 16 else f"block_size={plan.blocks.block_size}, "
        console.print(
            Text.assemble(
                "\nFor all of that memory: ",
                (f"PagedCache(model.config, {block_size}num_blocks={plan.num_blocks})", "bold"),
            )
        )
    if plan.budget is None:
        console.print(
            Text("\nSay how much memory there is (--gpu-memory 80GiB, or --kv-memory) to see what fits.", "cyan")
        )
    for note in plan.notes:
        console.print(Text(note, "yellow"))


def _print_model(plan: CapacityPlan, console: Console, size: Callable[[float], str]) -> None:
    footprint, budget = plan.footprint, plan.budget
    if footprint.model is not None:
        parameters = f"{_short(footprint.parameters)} parameters, " if footprint.parameters else ""
        console.print(f"[bold]{escape(footprint.model)}[/], {parameters}{footprint.dtype}", highlight=False)
    if budget is not None:
        text = f"{size(budget.kv_bytes)} for keys and values"
        if budget.total_bytes is not None:
            text += (
                f": {size(budget.total_bytes)}, less {size(budget.weight_bytes or 0)} for weights and "
                f"{size(budget.overhead_bytes or 0)} for activations and the rest"
            )
        console.print(text, highlight=False)
    kinds = ""
    if footprint.model is not None:
        kinds = ": " + ", ".join(
            f"{group.layers} layer{'s' * (group.layers != 1)} of {group.name}"
            + (f" ({size(group.bytes_per_token)})" if len(footprint.groups) > 1 else "")
            for group in footprint.groups
        )
    console.print(f"A token takes [bold]{size(footprint.bytes_per_token)}[/]{escape(kinds)}", highlight=False)
    if footprint.state_bytes:
        console.print(
            f"A request takes {size(footprint.state_bytes)} for the states of recurrent layers, however long it is",
            highlight=False,
        )


def _print_ways(plan: CapacityPlan, console: Console, size: Callable[[float], str]) -> None:
    title = f"How many requests of {plan.length:,} tokens fit"
    table = _table(title, ("", "reserved each", "of that wasted", "requests"))
    table.add_row(f"{plan.max_length:,} tokens reserved", *_figures(plan.contiguous, size))
    table.add_row(f"blocks of {plan.blocks.block_size} tokens", *_figures(plan.blocks, size), style="bold")
    if plan.own_windows is not None:
        table.add_row("  in use at the peak", *_figures(plan.own_windows, size))
    console.print(table, highlight=False)
    if plan.blocks.idle_window_bytes:
        console.print(
            f"[dim]Of each {size(plan.blocks.idle_window_bytes)} are reserved for windowed layers and never in use, "
            f"{size(plan.blocks.tail_bytes)} are ends of blocks.[/]",
            highlight=False,
        )
    if plan.requests_bytes is not None:
        tokens, blocks, contiguous = map(size, plan.requests_bytes)
        console.print(
            f"{plan.requests:,} such requests: {tokens} of tokens, [bold]{blocks}[/] in blocks, {contiguous} with "
            f"{plan.max_length:,} tokens reserved for each",
            highlight=False,
        )


def _print_block_sizes(plan: CapacityPlan, console: Console, size: Callable[[float], str]) -> None:
    of = "the real lengths" if plan.lengths else f"lengths around {plan.length:,} tokens"
    table = _table(
        f"Block sizes, on average over {of}", ("tokens a block", "reserved each", "of that wasted", "requests")
    )
    for fit in plan.block_sizes:
        style = "bold" if fit.block_size == plan.blocks.block_size else None
        table.add_row(f"{fit.block_size}", *_figures(fit, size), style=style)
    console.print(table, highlight=False)


def _print_lengths(plan: CapacityPlan, lengths: LengthsPlan, console: Console, size: Callable[[float], str]) -> None:
    table = _table(
        f"{lengths.count:,} real requests, tokens",
        ("", "mean", *(f"{q} %" for q in lengths.total.quantiles), "longest"),
    )
    for name, spread in (("prompt", lengths.prompt), ("answer", lengths.output), ("both", lengths.total)):
        quantiles = (f"{value:,.0f}" for value in spread.quantiles.values())
        table.add_row(name, f"{spread.mean:,.0f}", *quantiles, f"{spread.max:,}")
    console.print(table, highlight=False)
    table = _table("", ("at a time", "reserved each", "requests"))
    for name, nbytes, fits in (
        ("in blocks, at a random moment (long answers run longer)", lengths.running_bytes, lengths.running),
        ("the average request at its last token", lengths.ended_bytes, lengths.ended),
        ("all as long as the longest", lengths.longest_bytes, lengths.worst),
        (f"{plan.max_length:,} tokens reserved", plan.contiguous.bytes_per_request, plan.contiguous.requests),
    ):
        table.add_row(name, size(nbytes), _count(fits))
    console.print(table, highlight=False)
    if lengths.too_long:
        console.print(
            f"[yellow]{lengths.too_long:,} of them are longer than {plan.max_length:,} tokens and fit into no "
            "reservation.[/]",
            highlight=False,
        )


def _figures(fit: Fit, size: Callable[[float], str]) -> tuple[str, str, str]:
    return size(fit.bytes_per_request), f"{size(fit.waste_bytes)} ({fit.waste:.1%})", _count(fit.requests)


def _short(parameters: int) -> str:
    name, unit = next(((n, u) for n, u in (("billion", 1e9), ("million", 1e6)) if parameters >= u), ("thousand", 1e3))
    return f"{parameters / unit:.3g} {name}"


def _count(requests: int | None) -> str:
    return "–" if requests is None else f"{requests:,}"


def _table(title: str, columns: tuple[str, ...]) -> Table:
    heading = f"\n{title}" if title else None
    table = Table(title=heading, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table
