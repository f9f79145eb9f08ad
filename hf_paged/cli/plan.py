"""`hf-paged plan`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_paged.cli.main import app, examples
from hf_paged.cli.options import BlockSizeOption, DType, JsonOption, check_block_size, torch_dtype
from hf_paged.cli.running import mendable_errors, print_json, progress_line


@app.command(
    epilog=examples(
        "hf-paged plan org/model --gpu-memory 80GiB",
        "hf-paged plan config.json --gpu-memory 24GiB --length 500 --max-length 8192",
        "hf-paged plan org/model --kv-memory 40GB --lengths requests.jsonl --tokenizer org/model "
        "--prompt-column prompt --output-column answer",
        "hf-paged plan --kv-bytes-per-token 250KB --kv-memory 40GB --requests 50",
    )
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
    with mendable_errors(), progress_line() as progress:
        check_block_size(block_size)
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
            footprint = capacity.footprint_of(config, torch_dtype(dtype))
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
        print_json(result.as_dict())
    else:
        typed = [size for size in (gpu_memory, kv_memory, kv_bytes_per_token) if size is not None]
        print_plan(result, Console(), binary=not typed or typed[0].strip().lower().endswith("ib"))


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
    from hf_paged.models import load_tokenizer, quiet

    with quiet(hub=False):
        tokenizer = load_tokenizer(name)
    return lambda texts: [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
