"""`hf-paged soak`."""

from __future__ import annotations

from typing import Annotated

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
)
from hf_paged.cli.running import load, mendable_errors, progress_line, show


@app.command(
    epilog=examples(
        "hf-paged soak",
        "hf-paged soak --minutes 30 --seed 7",
        "hf-paged soak --model ./my-model --json",
    )
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
    with mendable_errors(), progress_line() as progress:
        check_block_size(block_size)
        progress("loading torch and transformers")
        from hf_paged.bench.soak import SoakOptions, run_soak
        from hf_paged.bench.soak_report import print_soak

        options = SoakOptions(
            minutes=minutes, seed=seed, threads=threads, checks=checks, num_blocks=num_blocks, block_size=block_size
        )
        loaded, _ = load(model, dtype, device, progress)
        try:
            result = run_soak(loaded, options, progress=progress)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="'--blocks'") from error
    show(result, print_soak, as_json)
