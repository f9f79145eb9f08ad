"""The notebooks run from top to bottom, and are saved with what they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
for package in ("nbclient", "ipykernel", "matplotlib"):
    pytest.importorskip(package)

from notebooks.execute import main, run, stderr_of  # noqa: E402

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
BY_NAME = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
VARIES = "varies"
"""A tag of cells that show measurements."""


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def test_there_are_notebooks():
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{number:02d}" for number in range(1, 8)]


@BY_NAME
def test_a_notebook_is_saved_with_its_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs and not any(output.output_type == "error" for output in outputs)
    assert not stderr_of(notebook)
    texts = [cell.source for cell in notebook.cells] + [text_of(cell) for cell in cells]
    assert not re.search(r"(^|[\s'\"(])/(home|root|tmp|usr|Users)/|site-packages", "\n".join(texts))


@BY_NAME
def test_a_notebook_says_what_it_shows_and_is_short(path):
    notebook = nbformat.read(path, as_version=4)
    first = notebook.cells[0]
    assert first.cell_type == "markdown" and first.source.startswith("# ") and len(first.source.split()) > 20
    assert 10 <= len(notebook.cells) <= 22
    assert any(re.search("^ *assert ", cell.source, re.MULTILINE) for cell in code_cells(notebook))


@BY_NAME
def test_a_notebook_runs_and_shows_what_it_was_saved_with(path, smollm2):
    saved = nbformat.read(path, as_version=4)
    if "from datasets import" in "".join(cell.source for cell in saved.cells):
        pytest.importorskip("datasets")
    executed = run(path)
    assert not stderr_of(executed)
    for cell, before in zip(code_cells(executed), code_cells(saved), strict=True):
        kinds, kinds_before = ([set(output.get("data", [])) for output in one.outputs] for one in (cell, before))
        assert kinds == kinds_before  # a picture is a picture still
        if VARIES not in cell.metadata.get("tags", []):
            assert drop_sizes(text_of(cell)) == drop_sizes(text_of(before))


def test_a_notebook_that_fails_or_warns_is_not_saved(tmp_path, capsys):
    from nbclient.exceptions import CellExecutionError

    path = tmp_path / "one.ipynb"
    for source in ("import sys; print('hm', file=sys.stderr)", "1 / 0"):
        cells = [nbformat.v4.new_code_cell(source)]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
        before = path.read_bytes()
        if "stderr" in source:
            assert main([str(path)]) == 1
            assert "one.ipynb writes to stderr, and was not saved:\nhm" in capsys.readouterr().err
        else:
            with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
                main([str(path)])
        assert path.read_bytes() == before


def text_of(cell):
    return "".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)


def drop_sizes(text):
    """Pools are sized by the memory of the machine; all else must be the same."""
    return re.sub(r"of [\d,]+( blocks|, block_size)", r"of N\1", text)
