"""The notebooks run from top to bottom, and are saved with what they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_saved_with_its_outputs(path):
    cells = code_cells(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs and not any(output.output_type == "error" for output in outputs)
    assert "/site-packages/" not in str(outputs), "a warning with a path of the machine it ran on"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_was_saved_with(path, smollm2, tmp_path, monkeypatch):
    from ipykernel.kernelspec import install
    from nbclient import NotebookClient

    # A kernel of this very environment, whatever the machine calls `python3`.
    install(prefix=str(tmp_path), kernel_name="hf-paged-test")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    notebook = nbformat.read(path, as_version=4)
    saved = [text_of(cell) for cell in code_cells(notebook)]
    client = NotebookClient(notebook, timeout=300, kernel_name="hf-paged-test")
    client.execute(cwd=str(path.parent))
    executed = [text_of(cell) for cell in code_cells(notebook)]
    # Pools are sized by the memory of the machine; all else must be the same.
    assert [drop_sizes(text) for text in executed] == [drop_sizes(text) for text in saved]


def text_of(cell):
    return "".join(
        output.get("text", "") or output.get("data", {}).get("text/plain", "")
        for output in cell.outputs
        if output.get("name") != "stderr"
    )


def drop_sizes(text):
    return re.sub(r"of [\d,]+( blocks|, block_size)", r"of N\1", text)
