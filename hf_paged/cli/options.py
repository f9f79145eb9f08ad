"""Options that several commands have, and what they are turned into."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class DType(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


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


def check_block_size(block_size: int) -> None:
    if block_size & (block_size - 1):
        raise typer.BadParameter(f"{block_size} is not a power of two", param_hint="'--block-size'")


def check_writable(path: Path, option: str) -> None:
    """Whether a file can be written, before there is anything to write."""
    if not path.parent.is_dir():
        raise typer.BadParameter(f"the folder {path.parent} does not exist", param_hint=f"'{option}'")
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror}", param_hint=f"'{option}'") from error
    if is_new:
        path.resolve().unlink()  # where it is a link, the link stays


def torch_dtype(dtype: DType) -> Any:
    import torch

    return None if dtype is DType.auto else getattr(torch, dtype.value)
