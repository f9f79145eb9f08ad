"""`hf-paged demo`: one batch of prompts answered with transformers' ordinary cache and with PagedCache, side by side.

`run_demo` computes and returns a `DemoResult`; `print_demo` shows one.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TextIO

import torch
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import DynamicCache, TextStreamer
from transformers.generation.streamers import BaseStreamer

from hf_paged import CacheStats, PagedCache, paged_attention
from hf_paged.bench.harness import Comparison, Machine, Ratio, compare, describe_machine, synchronizer
from hf_paged.bench.memory import dynamic_bytes
from hf_paged.models import cache_keyword, display_name
from hf_paged.pictures import text_map
from hf_paged.sizes import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import Cache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

DYNAMIC, PAGED = "DynamicCache", "PagedCache"
PICTURE_WIDTH = 64

PROMPTS = (
    "What is the capital of France?",
    "Write a short poem about the sea in autumn.",
    "Explain in simple words why the sky is blue during the day and red at sunset.",
    "I have two eggs, a tomato, some old bread, an onion and a little cheese in my kitchen, and only one pan. "
    "Which dish can I cook with these things in less than twenty minutes? List the steps one by one.",
    "Correct the mistakes in this letter and keep its tone: Dear Mr Miller, I writing to you because the heater in my "
    "flat do not work since two weeks. I have call your office three time and nobody have come. The nights is cold "
    "now and my little daughter are ill. Please can you sends somebody until Friday at the latest? I am at home every "
    "day after four, and my neighbour have a key if I am not there. With many thank and kind regard, Anna Novak.",
    "Summarise the following text in two sentences.\n\n"
    "For most of the history of computing, the memory of a machine was one long row of numbered cells, and a program "
    "was given one unbroken stretch of it. When a program asked for more than it had been given, it had to be moved "
    "somewhere else as a whole, or it had to stop. Between the stretches lay gaps that were too small to be of use to "
    "anybody, and as programs came and went the gaps grew in number, until half of a costly memory could lie idle "
    "while new work was turned away at the door. Operators learned to plan ahead and to ask for far more than they "
    "needed, which made matters worse for everyone.\n\n"
    "In 1962 a group of engineers in Manchester finished a computer called Atlas, which did away with the unbroken "
    "stretch. They cut the memory into pages of equal size and kept a table that said where each page of a program "
    "was to be found. To the program its memory still looked like one long row; in truth its pages lay scattered "
    "wherever there was room, and a page that nobody had touched for a while could be moved to a slower store until "
    "it was wanted again. No gap was ever too small to be used, since every page fitted every place. The idea was so "
    "good that within fifteen years nearly every large computer worked in this way, and today every telephone does.",
)
"""From a line to two paragraphs: the more their lengths differ, the more of a padded cache is padding."""


@dataclass(frozen=True)
class DemoOptions:
    """What the demo runs; `num_blocks` of the pool follow from the prompts and `max_new_tokens`."""

    max_new_tokens: int = 64
    block_size: int = 16
    repeats: int = 3


@dataclass(frozen=True)
class Difference:
    """Where two answers part, and whether a near tie explains it.

    Attributes:
        position: index of the first token that differs.
        dynamic_token, paged_token: what each side chose there.
        gap: difference of the two tokens' logits in a run without any cache, in float64 where the model is small.
        tolerance: gaps up to this are a near tie: rounding decides which token wins.
    """

    position: int
    dynamic_token: str
    paged_token: str
    gap: float
    tolerance: float

    @property
    def is_near_tie(self) -> bool:
        return self.gap <= self.tolerance


@dataclass(frozen=True)
class Answer:
    """One prompt and what the model made of it; complete unless the limit of new tokens cut it off."""

    prompt: str
    prompt_tokens: int
    new_tokens: int
    is_complete: bool
    text: str
    paged_text: str
    difference: Difference | None


@dataclass(frozen=True)
class Side:
    """Speed and memory of one of the two ways.

    Attributes:
        seconds: median over the repeats, prompts included.
        tokens_per_second: new tokens of all rows over `seconds`.
        decode_tokens_per_second: the same without the time until the first token.
        reserved_bytes: taken from the system for keys and values.
        used_bytes: of these, in use when the last token was made.
        token_bytes: of these, what real tokens take; the rest is padding or the unfilled ends of blocks.
    """

    name: str
    seconds: float
    tokens_per_second: float
    decode_tokens_per_second: float
    reserved_bytes: int
    used_bytes: int
    token_bytes: int

    @property
    def waste(self) -> float:
        """Share of the bytes in use that hold no real token."""
        return 1 - self.token_bytes / self.used_bytes


@dataclass(frozen=True)
class DemoResult:
    """All that the demo found."""

    model: str
    dtype: str
    device: str
    options: DemoOptions
    answers: tuple[Answer, ...]
    dynamic: Side
    paged: Side
    comparison: Comparison
    stats: CacheStats
    block_map: str
    machine: Machine

    @property
    def speedup(self) -> Ratio:
        """How many times faster a whole generate() is, round by round."""
        return self.comparison.ratio(PAGED)

    @property
    def is_disturbed(self) -> bool:
        """Whether the rounds differ so much that the speeds say little."""
        return self.speedup.iqr > 0.25 * self.speedup.median

    @property
    def num_equal(self) -> int:
        return sum(answer.difference is None for answer in self.answers)

    @property
    def passed(self) -> bool:
        """Whether every pair of texts is equal, or parts at a near tie."""
        return all(answer.difference is None or answer.difference.is_near_tie for answer in self.answers)

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "options": asdict(self.options),
            "passed": self.passed,
            "equal_texts": self.num_equal,
            "answers": [asdict(answer) for answer in self.answers],
            "dynamic": asdict(self.dynamic) | {"waste": self.dynamic.waste},
            "paged": asdict(self.paged) | {"waste": self.paged.waste},
            "disturbed": self.is_disturbed,
            "timing": self.comparison.as_dict(),
            "stats": self.stats.as_dict(),
            "machine": self.machine.as_dict(),
        }


def run_demo(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: DemoOptions,
    *,
    prompts: Sequence[str] = PROMPTS,
    progress: Callable[[str], object] | None = None,
) -> DemoResult:
    """Answer `prompts` as one left-padded batch in both ways, `options.repeats` times each, in alternating order."""
    say = progress or (lambda text: None)
    batch = _encode(tokenizer, prompts, model.device)
    eos = model.generation_config.eos_token_id
    eos = eos if isinstance(eos, list) else [eos]
    ways = {
        DYNAMIC: _Way(model, batch, lambda: DynamicCache(config=model.config)),
        PAGED: _PagedWay(model, batch, lambda: _paged_cache(model, batch, options)),
    }
    for name, way in ways.items():
        say(f"warming up {name}")
        way.run(min(4, options.max_new_tokens))
    for way in ways.values():
        way.forget()
    comparison = compare(
        {name: lambda way=way: way.run(options.max_new_tokens) for name, way in ways.items()},
        repeats=options.repeats,
        warmup=0,
        sync=synchronizer(model.device),
        progress=lambda text: say(f"answering {len(prompts)} prompts both ways, {text}"),
    )
    say("comparing")
    start = batch["input_ids"].shape[1]
    dynamic_rows, paged_rows = ([_until(row[start:], eos) for row in ways[name].ids.tolist()] for name in ways)
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    answers = tuple(
        Answer(
            prompt=prompt,
            prompt_tokens=length,
            new_tokens=len(want),
            is_complete=want[-1] in eos,
            text=tokenizer.decode(want, skip_special_tokens=True).strip(),
            paged_text=tokenizer.decode(got, skip_special_tokens=True).strip(),
            difference=_difference(model, tokenizer, ids[mask.bool()], want, got) if want != got else None,
        )
        for prompt, length, ids, mask, want, got in zip(
            prompts, lengths, batch["input_ids"], batch["attention_mask"], dynamic_rows, paged_rows, strict=True
        )
    )
    stats, held = ways[PAGED].cache.stats(), dynamic_bytes(ways[DYNAMIC].cache)
    # Both hold the same tokens, so the ordinary cache is charged what they take in the blocks.
    return DemoResult(
        model=display_name(model),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        options=options,
        answers=answers,
        dynamic=_side(DYNAMIC, comparison, ways, dynamic_rows, (held, held, stats.token_bytes)),
        paged=_side(PAGED, comparison, ways, paged_rows, (stats.reserved_bytes, stats.used_bytes, stats.token_bytes)),
        comparison=comparison,
        stats=stats,
        block_map=text_map(ways[PAGED].cache, width=PICTURE_WIDTH),
        machine=describe_machine(),
    )


def stream_answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: DemoOptions,
    *,
    prompt: str = PROMPTS[2],
    file: TextIO | None = None,
) -> None:
    """Answer one prompt with PagedCache, writing words to `file` (default: stdout) as they come."""
    file = file or sys.stdout
    print(prompt, end="\n\n", file=file)
    batch = _encode(tokenizer, [prompt], model.device)
    streamer = _FileStreamer(tokenizer, file)
    with paged_attention(model):
        model.generate(
            **batch,
            **{cache_keyword(model): _paged_cache(model, batch, options)},
            generation_config=_greedy(model, options.max_new_tokens),
            streamer=streamer,
        )
    print(file=file)


def print_demo(result: DemoResult, console: Console) -> None:
    """Show the texts, the table of speed and memory, and the pool's blocks."""
    lengths = [answer.prompt_tokens for answer in result.answers]
    console.print(
        f"[bold]{escape(result.model)}[/], {result.dtype}, {result.device}: {len(lengths)} prompts of {min(lengths)} "
        f"to {max(lengths)} tokens in one padded batch, up to {result.options.max_new_tokens} new tokens each",
        highlight=False,
    )
    console.print(Text(f"{result.machine}\n", "dim"))
    for number, answer in enumerate(result.answers, 1):
        head = Text.assemble(
            (f"{number} ", "bold"),
            (_first_line(answer.prompt, console.width - 24), "bold cyan"),
            (f"  {answer.prompt_tokens} tokens", "dim"),
        )
        console.print(head, highlight=False)
        if (difference := answer.difference) is None:
            text = Text.assemble(answer.text, ("" if answer.is_complete else " …", "dim"))
            console.print(Padding(text, (0, 0, 0, 2)), highlight=False)
            console.print(Padding(Text("✓ equal with both caches", "green"), (0, 0, 1, 2)))
            continue
        for name, text in ((DYNAMIC, answer.text), (PAGED, answer.paged_text)):
            console.print(Padding(Text.assemble((f"{name}: ", "bold"), text), (0, 0, 0, 2)), highlight=False)
        console.print(Padding(_explain(difference), (0, 0, 1, 2)))

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2))
    table.add_column("")
    table.add_column(DYNAMIC, justify="right")
    table.add_column(PAGED, justify="right")
    table.add_column("", style="bold")
    sides = (result.dynamic, result.paged)
    table.add_row("tokens per second", *(f"{s.tokens_per_second:.1f}" for s in sides), f"{result.speedup.median:.2f}x")
    decode = result.paged.decode_tokens_per_second / result.dynamic.decode_tokens_per_second
    table.add_row("  after the prompt", *(f"{s.decode_tokens_per_second:.1f}" for s in sides), f"{decode:.2f}x")
    table.add_row("KV memory reserved", *(format_size(s.reserved_bytes) for s in sides))
    less = result.dynamic.used_bytes / result.paged.used_bytes
    table.add_row("  in use", *(format_size(s.used_bytes) for s in sides), f"{less:.2f}x less")
    table.add_row("  real tokens", *(format_size(s.token_bytes) for s in sides))
    table.add_row("  wasted", *(f"{s.waste:.1%}" for s in sides))
    console.print(table, highlight=False)
    note = "Memory is at the last token."
    if result.options.repeats > 1:
        low, high = result.speedup.quartiles
        note = (
            f"Speed: medians of {result.options.repeats} alternating runs; the first ratio is the median of theirs, "
            f"run by run, with quartiles {low:.2f} and {high:.2f}. {note}"
        )
    console.print(f"[dim]{note}[/]", highlight=False)
    if result.is_disturbed:
        console.print(
            "[yellow]The runs differ widely, as when other work shares the machine: read nothing into the speeds.[/]"
        )
    console.print()
    console.print(
        Panel(
            Text(result.block_map),
            title=f"The pool: one mark for each block of {result.stats.block_size} tokens",
            title_align="left",
            expand=False,
            border_style="dim",
        )
    )
    total, equal = len(result.answers), result.num_equal
    if equal == total:
        verdict = Text(f"✓ All {total} texts are equal with both caches.", "green")
    elif result.passed:
        verdict = Text(f"≈ {equal} of {total} texts are equal; the others part at near ties.", "yellow")
    else:
        verdict = Text(f"✗ Only {equal} of {total} texts are equal.", "red")
    console.print(verdict)


class _StepClock(BaseStreamer):
    """Notes when generate() hands over the prompt and each step's tokens; `times[1]` is the first token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class _Way:
    """One way to answer the batch: a fresh cache each time; keeps the last run's ids and cache, and all clocks."""

    def __init__(self, model: PreTrainedModel, batch: dict[str, torch.Tensor], new_cache: Callable[[], Cache]) -> None:
        self.model, self.batch, self.new_cache = model, batch, new_cache
        self.cache: Any = None
        self.ids = torch.empty(0)  # [rows, prompt + new tokens]
        self.decode_seconds: list[float] = []

    def run(self, max_new_tokens: int) -> None:
        clock = _StepClock()
        self.cache = None  # before the next is made: two at once would be no fair picture of memory
        self.cache = self.new_cache()
        self.ids = self.model.generate(
            **self.batch,
            **{cache_keyword(self.model): self.cache},
            generation_config=_greedy(self.model, max_new_tokens),
            streamer=clock,
        )
        self.decode_seconds.append(clock.times[-1] - clock.times[1])

    def forget(self) -> None:
        self.cache, self.decode_seconds = None, []


class _PagedWay(_Way):
    def run(self, max_new_tokens: int) -> None:
        with paged_attention(self.model):
            super().run(max_new_tokens)


class _FileStreamer(TextStreamer):
    def __init__(self, tokenizer: PreTrainedTokenizerBase, file: TextIO) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.file = file

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        print(text, end="\n" if stream_end else "", file=self.file, flush=True)


def _paged_cache(model: PreTrainedModel, batch: dict[str, torch.Tensor], options: DemoOptions) -> PagedCache:
    """A cache whose pool just holds the batch, should every row run to its limit."""
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    blocks = sum(-(-(length + options.max_new_tokens) // options.block_size) for length in lengths)
    return PagedCache(model.config, block_size=options.block_size, num_blocks=blocks)


def _encode(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], device: torch.device
) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, `[rows, length]`, padded on the left; through the chat template if any."""
    if tokenizer.chat_template is None:
        batch = tokenizer(list(prompts), padding=True, return_tensors="pt")
    else:
        batch = tokenizer.apply_chat_template(
            [[{"role": "user", "content": prompt}] for prompt in prompts],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
    return {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}


def _greedy(model: PreTrainedModel, max_new_tokens: int) -> GenerationConfig:
    """The model's own generation config, but without sampling: both ways must give the same text."""
    config = copy.deepcopy(model.generation_config)
    config.do_sample, config.num_beams, config.max_new_tokens = False, 1, max_new_tokens
    config.temperature = config.top_p = config.top_k = None
    return config


def _until(ids: list[int], eos: Sequence[int | None]) -> list[int]:
    """`ids` up to the first end token, which is kept."""
    for index, token in enumerate(ids):
        if token in eos:
            return ids[: index + 1]
    return ids


def _difference(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: torch.Tensor, want: list[int], got: list[int]
) -> Difference:
    """Where `want` and `got` part, judged by a run of the prompt `[length]` and the common tokens without a cache."""
    position = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), min(len(want), len(got)))
    first, second = want[position], got[position]
    ids = torch.cat([prompt, prompt.new_tensor(want[:position])])[None]
    judge, tolerance = model, 4 * torch.finfo(model.dtype).eps
    if model.dtype == torch.float32 and model.num_parameters() < 1e9:
        judge = copy.deepcopy(model).double()
    with torch.no_grad():
        logits = judge(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].double()
    return Difference(
        position=position,
        dynamic_token=tokenizer.decode([first]),
        paged_token=tokenizer.decode([second]),
        gap=(logits[first] - logits[second]).abs().item(),
        tolerance=max(1e-4, tolerance * logits.abs().max().item()),
    )


def _side(
    name: str, comparison: Comparison, ways: dict[str, _Way], rows: list[list[int]], sizes: tuple[int, int, int]
) -> Side:
    tokens, seconds = sum(map(len, rows)), comparison.timings[name].median
    decode = statistics.median(ways[name].decode_seconds)
    return Side(name, seconds, tokens / seconds, (tokens - len(rows)) / decode if decode else 0.0, *sizes)


def _explain(difference: Difference) -> Text:
    where = f"token {difference.position + 1}: {difference.dynamic_token!r} against {difference.paged_token!r}"
    gap = f"without any cache their logits are {difference.gap:.2g} apart"
    if difference.is_near_tie:
        return Text(f"≈ the texts part at {where}; a near tie: {gap}", "yellow")
    return Text(f"✗ the texts differ from {where}; no near tie: {gap}", "red")


def _first_line(text: str, width: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: max(width - 1, 1)] + "…"


def _times(ratio: Ratio) -> str:
    low, high = ratio.quartiles
    return f"{ratio.median:.2f}x ({low:.2f} to {high:.2f})"
