"""What every command does around its work: exit codes, errors, a model, what goes on, and JSON."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from hf_paged.cli.options import DType, torch_dtype

CHECK_FAILED, CANNOT_RUN, INTERRUPTED = 1, 2, 130


QUIET = 15.0  # seconds between two lines where stderr is no terminal


class ProgressLine:
    """Says on stderr what is going on: in one line that goes away, or, where stderr is no terminal, in a line every
    `QUIET` seconds at most."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # Slow on purpose: the spinner runs beside what is being timed.
        self._status = console.status("", refresh_per_second=4) if console.is_terminal else None
        self._said_at = time.monotonic()

    def __call__(self, text: str) -> None:
        if self._status:
            self._status.update(f"[dim]{escape(text)} …[/]")
            self._status.start()
        elif time.monotonic() - self._said_at >= QUIET:
            self._said_at = time.monotonic()
            self._console.print(f"{text} …", markup=False, highlight=False, soft_wrap=True)

    def pause(self) -> None:
        """Clear the line until the next report."""
        if self._status:
            self._status.stop()

    @contextlib.contextmanager
    def bar(self, text: str, total: int) -> Iterator[Callable[[int], object]]:
        """A bar in place of the line, which is told how much of `total` is done."""
        self.pause()
        if not self._status:
            yield lambda done: self(f"{text}: {done:,} of {total:,}")
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("[dim]{task.description}[/]"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task(text, total=total)
            yield lambda done: bar.update(task, completed=done)


@contextlib.contextmanager
def progress_line() -> Iterator[ProgressLine]:
    progress = ProgressLine(Console(stderr=True))
    try:
        yield progress
    finally:
        progress.pause()


@contextlib.contextmanager
def mendable_errors() -> Iterator[None]:
    """Turn the errors that a user can mend into a message and an exit code."""
    from hf_paged import OutOfBlocksError
    from hf_paged.capacity import LengthsError
    from hf_paged.models import ModelLoadError

    try:
        yield
    except (LengthsError, ModelLoadError, OutOfBlocksError, NotImplementedError) as error:
        Console(stderr=True).print(f"[bold red]Error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(CANNOT_RUN) from error


def load(
    model: str | None,
    dtype: DType,
    device: str | None,
    progress: Callable[[str], Any],
    *,
    needs_tokenizer: bool = False,
) -> tuple[Any, Any]:
    """A model and its tokenizer, as the options say; the tokenizer may be None unless it is needed."""
    import torch

    from hf_paged.models import DEMO_MODEL, beginning, demo_model_is_converted, load_model

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise typer.BadParameter(f"cannot use '{device}': {beginning(error)}", param_hint="'--device'") from error
    if model is None and not demo_model_is_converted():
        progress(f"converting {DEMO_MODEL}, this once, which takes about 20 seconds")
    else:
        progress(f"loading {model or DEMO_MODEL}")
    return load_model(model, torch_dtype(dtype), device, needs_tokenizer=needs_tokenizer)


def print_json(result: dict[str, Any]) -> None:
    typer.echo(json.dumps(result, indent=2))


def show(
    result: Any, print_result: Callable[[Any, Console], None], as_json: bool, *, is_interrupted: bool = False
) -> None:
    """Print what a command has found, by `print_result` or as JSON, and exit with 130 if it was interrupted and with 1
    if a check failed."""
    if as_json:
        print_json(result.as_dict())
    else:
        print_result(result, Console())
    if is_interrupted:
        raise typer.Exit(INTERRUPTED)
    if not result.passed:
        raise typer.Exit(CHECK_FAILED)
