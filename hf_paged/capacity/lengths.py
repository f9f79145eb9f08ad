"""Lengths of real requests, from a file that the `datasets` library reads."""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
NOTHING_IN_IT = ("StopIteration", "corresponds to no data", "No columns to parse", "BatchSize must be greater than 0")
"""What `datasets` says of a file without a line."""
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


class LengthsError(RuntimeError):
    """Lengths could not be read; the message says what to do."""


def read_lengths(
    path: str | Path,
    prompt_column: str,
    output_column: str,
    *,
    count_tokens: Callable[[list[str]], list[int]] | None = None,
) -> tuple[list[int], list[int]]:
    """Tokens of each prompt and of each answer, from a file of JSON lines, CSV or Parquet.

    A column holds numbers of tokens, lists of token ids, or texts.

    Args:
        prompt_column, output_column: names of columns.
        count_tokens: gives the tokens of each of some texts; needed for columns of text.

    Raises:
        LengthsError: `datasets` is not installed, the file or a column is missing, or it holds something else.
    """
    path = Path(path).expanduser()
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _COMPRESSED]
    suffix = suffixes[-1] if suffixes else ""
    if suffix not in FORMATS:
        raise LengthsError(f"Cannot tell what {path.name} is by its name: it must end in {', '.join(FORMATS)}.")
    if not path.is_file():
        raise LengthsError(f"Cannot read lengths from {path}: there is no such file.")
    try:
        import datasets
    except ImportError as error:
        raise LengthsError(
            "Reading lengths needs the datasets library. Install it with\n    pip install datasets\n"
            'or everything for notebooks with\n    pip install "hf-paged[notebook]"'
        ) from error
    options: dict[str, Any] = {"delimiter": "\t"} if suffix == ".tsv" else {}
    bars, verbosity = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it would log what is raised here
    try:
        with tempfile.TemporaryDirectory() as scratch:  # it would keep a copy of every file it has read
            table = datasets.load_dataset(
                FORMATS[suffix], data_files=glob.escape(str(path)), split="train", cache_dir=scratch, **options
            )
            if missing := [name for name in (prompt_column, output_column) if name not in table.column_names]:
                raise LengthsError(
                    f"{path.name} has no column '{missing[0]}'; its columns are {', '.join(table.column_names)}. Name "
                    "them with --prompt-column and --output-column."
                )
            prompt, output = (
                _lengths(list(table[name]), name, count_tokens) for name in (prompt_column, output_column)
            )
            del table
            return prompt, output
    except LengthsError:
        raise
    except Exception as error:  # whatever a reader raises about a file that is none of its kind
        reason = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0]
        if any(text in f"{type(error).__name__} {reason}" for text in NOTHING_IN_IT):
            reason = "it holds no requests"
        raise LengthsError(f"Cannot read {path.name}: {reason}") from error
    finally:
        datasets.logging.set_verbosity(verbosity)
        if not bars:
            datasets.enable_progress_bars()


def _lengths(values: list[Any], name: str, count_tokens: Callable[[list[str]], list[int]] | None) -> list[int]:
    if not values:
        raise LengthsError(f"Column '{name}' holds no values.")
    kinds = {type(value) for value in values}
    if kinds <= {int, float} and all(value >= 0 and value % 1 == 0 for value in values):
        return [int(value) for value in values]
    if kinds == {list}:
        return [len(value) for value in values]
    if kinds == {str}:
        if count_tokens is None:
            raise LengthsError(f"Column '{name}' holds texts: say with --tokenizer what counts their tokens.")
        return count_tokens(values)
    if kinds <= {int, float}:
        row, value = next((i, v) for i, v in enumerate(values) if not v >= 0 or v % 1 != 0)
        raise LengthsError(f"Column '{name}' holds {value} in its row {row}, which is no length.")
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise LengthsError(f"Column '{name}' must hold numbers of tokens, lists of token ids or texts, not {names}.")
