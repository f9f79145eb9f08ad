"""`hf-paged bench`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_paged.cli.main import app, examples
from hf_paged.cli.options import (
    BlockSizeOption,
    DeviceOption,
    DType,
    DTypeOption,
    JsonOption,
    ModelOption,
    check_block_size,
    check_writable,
)
from hf_paged.cli.running import load, mendable_errors, progress_line, show


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


@app.command(
    epilog=examples(
        "hf-paged bench --quick",
        "hf-paged bench --only blocks --picture blocks.png",
        "hf-paged bench --only decode --points 8x2048",
        "hf-paged bench --output bench.json",
    )
)
def bench(
    model: ModelOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller measurements.")] = False,
    only: Annotated[
        list[Part] | None,
        typer.Option(metavar="PART", help="Measure this part only; may be repeated.", show_default="all parts"),
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
    with mendable_errors(), progress_line() as progress:
        check_block_size(block_size)
        chosen = _parse_points(points) if points else None
        sizes = _parse_block_sizes(block_sizes)
        for option, path in (("--output", output), ("--picture", picture)):
            if path:
                check_writable(path, option)
        if picture:
            _check_picture(picture, only)
        progress("loading torch and transformers")
        from hf_paged.bench.report import print_suite
        from hf_paged.bench.suite import PARTS, SuiteOptions, run_suite

        parts = [part.value for part in only] if only else PARTS
        options = SuiteOptions(
            quick=quick, parts=parts, points=chosen, rounds=rounds, block_size=block_size, block_sizes=sizes
        )
        loaded, _ = load(model, dtype, device, progress)
        result = run_suite(loaded, options, progress=progress)
        if picture and result.blocks:
            from hf_paged.bench.picture import save_block_sizes

            save_block_sizes(result.blocks, result.title, picture)
    if output:
        output.write_text(json.dumps(result.as_dict(), indent=2) + "\n", encoding="utf-8")
    show(result, print_suite, as_json, is_interrupted=result.is_interrupted)


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
