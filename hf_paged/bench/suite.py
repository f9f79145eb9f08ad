"""`hf-paged bench`: all measurements in a row. `run_suite` computes, `print_suite` shows, `as_dict` is the JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hf_paged.bench.attention import measure_attention_layer
from hf_paged.bench.beams import BeamResult, measure_beams
from hf_paged.bench.decode import DYNAMIC, PAGED, POINTS, QUICK_POINTS, DecodePoint, DecodeResult, measure_decode
from hf_paged.bench.harness import Machine, Ratio, Timing, describe_machine
from hf_paged.bench.launch import measure_launches
from hf_paged.bench.memory import LENGTHS, QUICK_LENGTHS, TARGET, MemoryResult, measure_memory
from hf_paged.models import display_name

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel

PARTS = ("attention", "decode", "memory", "beams", "launch")


@dataclass(frozen=True)
class SuiteOptions:
    """What to measure: `quick` chooses what the other fields leave open."""

    quick: bool = False
    parts: Collection[str] = PARTS
    points: Sequence[DecodePoint] | None = None
    rounds: int | None = None
    block_size: int = 16


@dataclass(frozen=True)
class AttentionResult:
    """One attention layer of the model's shape at one point; `figures` are those of `measure_attention_layer`."""

    point: DecodePoint
    heads: int
    kv_heads: int
    head_dim: int
    figures: Mapping[str, float]

    def as_dict(self) -> dict[str, Any]:
        return {
            "batch": self.point.batch,
            "length": self.point.length,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            **self.figures,
        }


@dataclass(frozen=True)
class SuiteResult:
    """What was measured; a part that was left out is empty."""

    model: str
    dtype: str
    device: str
    block_size: int
    machine: Machine
    attention: tuple[AttentionResult, ...] = ()
    decode: tuple[DecodeResult, ...] = ()
    memory: MemoryResult | None = None
    beams: BeamResult | None = None
    launch: Mapping[str, float | str] | None = None
    """As `measure_launches`, or an error."""

    @property
    def passed(self) -> bool:
        """Whether both sides computed the same wherever they were compared."""
        return all(result.agrees for result in self.decode) and (self.beams is None or self.beams.agrees)

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "block_size": self.block_size,
            "machine": self.machine.as_dict(),
            "passed": self.passed,
            "attention_us": [result.as_dict() for result in self.attention],
            "decode": [result.as_dict() for result in self.decode],
            "memory": self.memory.as_dict() if self.memory else None,
            "beams": self.beams.as_dict() if self.beams else None,
            "launch": dict(self.launch) if self.launch else None,
        }


def run_suite(
    model: PreTrainedModel,
    options: SuiteOptions,
    *,
    progress: Callable[[str], object] | None = None,
) -> SuiteResult:
    """Measure the parts that `options` names, one after the other."""
    points = options.points or (QUICK_POINTS if options.quick else POINTS)
    attention: tuple[AttentionResult, ...] = ()
    decode: tuple[DecodeResult, ...] = ()
    memory = None
    if "attention" in options.parts and model.device.type == "cpu":  # it calls the kernels for CPUs
        attention = tuple(_measure_attention(model, points, options.block_size, progress or (lambda text: None)))
    if "decode" in options.parts:
        decode = tuple(
            measure_decode(
                model,
                points,
                block_size=options.block_size,
                rounds=options.rounds or (5 if options.quick else 9),
                progress=progress,
            )
        )
    if "memory" in options.parts:
        lengths = QUICK_LENGTHS if options.quick else LENGTHS
        memory = measure_memory(model, lengths, block_size=options.block_size, progress=progress)
    beams = None
    if "beams" in options.parts:
        sizes = {"prompts": 2, "beams": 3, "length": 256, "new_tokens": 8, "rounds": 2} if options.quick else {}
        beams = measure_beams(model, block_size=options.block_size, progress=progress, **sizes)
    launch: Mapping[str, float | str] | None = None
    if "launch" in options.parts:
        (progress or (lambda text: None))("launches of the Triton kernels")
        try:
            launch = measure_launches()
        except RuntimeError as error:
            launch = {"error": str(error)}
    return SuiteResult(
        model=display_name(model),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        block_size=options.block_size,
        machine=describe_machine(),
        attention=attention,
        decode=decode,
        memory=memory,
        beams=beams,
        launch=launch,
    )


def _measure_attention(
    model: PreTrainedModel, points: Sequence[DecodePoint], block_size: int, progress: Callable[[str], object]
) -> Iterator[AttentionResult]:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    for point in points:
        progress(f"attention layer {point}")
        figures = measure_attention_layer(*point, heads, kv_heads, head_dim, model.dtype, block_size)
        yield AttentionResult(point, heads, kv_heads, head_dim, figures)


def print_suite(result: SuiteResult, console: Console) -> None:
    """A table for each part."""
    console.print(
        f"[bold]{escape(result.model)}[/], {result.dtype}, {result.device}, blocks of {result.block_size} tokens",
        highlight=False,
    )
    console.print(Text(str(result.machine), "dim"))
    if result.attention:
        _print_attention(result.attention, console)
    if result.decode:
        _print_decode(result.decode, console)
    if result.memory:
        _print_memory(result.memory, console)
    if result.beams:
        _print_beams(result.beams, console)
    if result.launch:
        _print_launch(result.launch, console)


def _print_attention(results: Sequence[AttentionResult], console: Console) -> None:
    first = results[0]
    table = _table(f"One attention layer in decode: {first.heads} heads, {first.kv_heads} for KV, of {first.head_dim}")
    for column in ("rows x context", "dynamic, us", "paged, us", "times as fast", "GB/s: paged", "plain read"):
        table.add_column(column, justify="right")
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


def _print_decode(results: Sequence[DecodeResult], console: Console) -> None:
    table = _table("One decode step of the model")
    for column in (
        "rows x context",
        "dynamic, ms",
        "paged, ms",
        "times as fast",
        "GB/s: dynamic",
        "paged",
        "plain read",
    ):
        table.add_column(column, justify="right")
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
    for result in results:
        if not result.agrees:
            console.print(
                f"[red]✗ at {result.point} the logits of both sides differ by {result.logit_difference:.2g} of the "
                f"largest (allowed: {result.tolerance:.2g})[/]"
            )


def _print_memory(result: MemoryResult, console: Console) -> None:
    table = _table(f"Memory of {len(result.lengths)} rows of {min(result.lengths)} to {max(result.lengths):,} tokens")
    for column, justify in (("", "left"), ("MB", "right"), ("above the tokens", "right")):
        table.add_column(column, justify=justify)
    table.add_row(f"{result.tokens:,} real tokens", f"{result.token_bytes / 1e6:,.1f}", "")
    good = "green" if result.paged_overhead <= TARGET else "yellow"
    paged, dynamic = result.paged_bytes / 1e6, result.dynamic_bytes / 1e6
    table.add_row("PagedCache, blocks in use at the peak", f"{paged:,.1f}", f"[{good}]{result.paged_overhead:.1%}[/]")
    table.add_row("DynamicCache", f"{dynamic:,.1f}", f"{result.dynamic_overhead:.1%}")
    console.print(table, highlight=False)


def _print_beams(result: BeamResult, console: Console) -> None:
    table = _table(
        f"Beam search: {result.prompts} prompts of {result.length:,} tokens, {result.beams} beams, "
        f"{result.new_tokens} new tokens"
    )
    for column in ("", "generate(), s", "KV at the peak, MB"):
        table.add_column(column, justify="left" if not column else "right")
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
        console.print(f"\n[dim]{escape(str(result['error']))}[/]", highlight=False)
        return
    table = _table("Host time of a call of the Triton kernels, us, without the driver's own part")
    for column in ("storing a step", "decode", "decode in several pieces"):
        table.add_column(column, justify="right")
    table.add_row(*(f"{result[name]:.1f}" for name in ("write_us", "decode_us", "decode_split_us")))
    console.print(table, highlight=False)


def _table(title: str) -> Table:
    return Table(
        title=f"\n{title}", title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False
    )


def _milliseconds(timing: Timing) -> str:
    return f"{timing.median * 1e3:.1f} ± {timing.iqr * 1e3:.1f}"


def _times(ratio: Ratio) -> str:
    low, high = ratio.quartiles
    return f"[bold]{ratio.median:.2f}[/] ({low:.2f}-{high:.2f})"


def _rate(bytes_per_second: float | None) -> str:
    return "–" if bytes_per_second is None else f"{bytes_per_second / 1e9:.1f}"
