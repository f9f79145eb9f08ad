"""All classes, in processes of their own that take several each: a crash or a hang costs one class."""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

LIMIT = 180.0
"""Seconds for one class."""
BATCH = 40
"""Classes for one process; then memory is given back."""


def run_pairs(pairs: list[tuple[str, str, str]], limit: float = LIMIT, tell: bool = True) -> list[dict[str, Any]]:
    """A line for each of `(mapping, type, class)`."""
    lines: list[dict[str, Any]] = []
    left = list(pairs)
    while left:
        done, failure = _run_batch(left[:BATCH], limit, tell)
        lines += done
        left = left[len(done) :]
        if failure is not None and left:
            mapping, model_type, name = left.pop(0)
            lines.append(
                {"type": model_type, "cls": name, "mapping": mapping, "kinds": [], "given": "", "outcome": "crash"}
                | {"reason": failure, "plain": "", "layers": "", "batched": "crash", "batched_reason": failure}
            )
    return lines


def _run_batch(batch: list[tuple[str, str, str]], limit: float, tell: bool) -> tuple[list[dict[str, Any]], str | None]:
    command = [sys.executable, "-m", "hf_paged.sweep.worker"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    process.stdin.write(json.dumps(batch))
    process.stdin.close()
    found: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for text in process.stdout:
            if text.startswith("{"):
                found.put(text)
        found.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    done: list[dict[str, Any]] = []
    failure = None
    try:
        while len(done) < len(batch):
            try:
                text = found.get(timeout=limit)
            except queue.Empty:
                failure = f"did not end within {limit:.0f} s"
                break
            if text is None:
                failure = f"the process ended with code {process.wait()}"
                break
            done.append(json.loads(text))
            if tell:
                line = done[-1]
                outcomes = f"{line['outcome']:<13}{line['batched']:<13}"
                print(f"{outcomes}{line['type']} {line['cls']} {line['reason']}"[:200], flush=True)
    finally:
        process.kill()
        process.wait()
        reader.join(timeout=5)
    return done, failure


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m hf_paged.sweep", description=__doc__)
    parser.add_argument("--only", action="append", metavar="TYPE", help="run these types anew; the others stay")
    parser.add_argument("--json", type=Path, default=Path("sweep.json"), help="where every line is kept")
    parser.add_argument("--page", type=Path, help="where the table is written; patches/MODELS.md by default")
    arguments = parser.parse_args()
    from hf_paged.sweep.table import PAGE, write
    from hf_paged.sweep.tiny import pairs

    every = pairs()
    known = {}
    if arguments.only:
        if arguments.json.exists():
            known = {(line["type"], line["cls"]): line for line in json.loads(arguments.json.read_text())}
        chosen = [pair for pair in every if pair[1] in arguments.only]
        if not chosen:
            parser.error(f"transformers maps no type called {', '.join(arguments.only)}")
    else:
        chosen = every
    began = time.monotonic()
    for line in run_pairs(chosen):
        known[line["type"], line["cls"]] = line
    lines = [known[key] for _, *pair in every if (key := tuple(pair)) in known]
    arguments.json.write_text(json.dumps(lines, indent=1) + "\n")
    print(f"{len(chosen)} classes in {time.monotonic() - began:.0f} s")
    if len(lines) == len(every) or arguments.page:
        write(lines, arguments.page or PAGE)
