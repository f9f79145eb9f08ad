"""The program `hf-paged`, which the commands are added to."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

app = typer.Typer(
    name="hf-paged",
    help="A paged KV cache for Hugging Face transformers.\n\n"
    "Start with `hf-paged demo`: it answers a few prompts with the ordinary cache and with the paged one, "
    "checks that the texts are equal, and shows speed and memory of both. `hf-paged doctor` tells whether this machine "
    "is ready, `hf-paged plan MODEL` how many requests fit into its memory.",
    epilog="Exit codes: 0 all is well, 1 a check failed, 2 wrong usage or something missing, 130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def examples(*commands: str) -> str:
    """What the help of a command ends with."""
    return "Examples:\n\n" + "\n\n".join(f"- `{command}`" for command in commands)


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
