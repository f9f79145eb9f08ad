"""Run notebooks from top to bottom and save them with what they show: all of them, or those that are named.

    python notebooks/execute.py
    python notebooks/execute.py notebooks/02_how_paging_works.ipynb

They run in the environment of this very Python. A cell that fails or writes to stderr ends it, and that notebook is
left as it was.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import nbformat
from ipykernel.kernelspec import install
from nbclient import NotebookClient
from PIL import Image  # which matplotlib brings

FOLDER = Path(__file__).parent
KERNEL = "hf-paged-notebooks"
WITHOUT_WIDGETS = "ignore:IProgress not found"
"""Warnings that come where ipywidgets is not installed; the notebooks need none."""


def run(path: Path, timeout: int = 300) -> nbformat.NotebookNode:
    """A notebook with what its cells show now.

    Args:
        timeout: seconds that a cell may take.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        # A kernel of this very environment, whatever the machine calls `python3`.
        install(prefix=folder, kernel_name=KERNEL)
        jupyter_path = os.path.join(folder, "share", "jupyter")
        with mock.patch.dict(os.environ, JUPYTER_PATH=jupyter_path, PYTHONWARNINGS=WITHOUT_WIDGETS):
            client = NotebookClient(
                notebook, timeout=timeout, kernel_name=KERNEL, record_timing=False, coalesce_streams=True
            )
            client.execute(cwd=str(path.parent))
    notebook.metadata.language_info.pop("version", None)  # of the Python that happened to run it
    return notebook


def with_small_pictures(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The same with pictures of 128 colours, a quarter of the size: each version of a notebook stays in the history."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if png := output.get("data", {}).get("image/png"):
                picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
                small = io.BytesIO()
                picture.quantize(128, dither=Image.Dither.NONE).save(small, "png", optimize=True)
                output.data["image/png"] = base64.b64encode(small.getvalue()).decode()
    return notebook


def stderr_of(notebook: nbformat.NotebookNode) -> str:
    """What the cells wrote to stderr, warnings above all."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.get("name") == "stderr")


def main(names: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(FOLDER.glob("*.ipynb")))
    paths = parser.parse_args(names).notebooks
    if missing := [str(path) for path in paths if not path.is_file()]:
        parser.error(f"there is no notebook {missing[0]}")
    for path in paths:
        began = time.perf_counter()
        notebook = run(path)
        if noise := stderr_of(notebook):
            print(f"{path.name} writes to stderr, and was not saved:\n{noise}", file=sys.stderr)
            return 1
        nbformat.write(with_small_pictures(notebook), path)
        print(f"{path.name}: {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
