"""The page of models: written from the lines of a sweep, and read again by the tests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_paged.sweep.check import OUTCOMES

PAGE = Path(__file__).parent.parent / "patches" / "MODELS.md"

MEANINGS = {
    "kernel": "the attention of every layer that stores keys and values runs through the paged kernels",
    "mixed": "some of these layers do, or each does in some steps; the others take the dense way",
    "dense": "all take the dense way, or the model cannot be enabled and a PagedCache serves it as it is",
    "not used": "tokens are right, but the model keeps nothing in the cache that it is given",
    "refused": "an error by name, before anything wrong is computed",
    "no reference": "nothing to compare with: no tiny model of it could be built here, or it does not generate",
    "mismatch": "other tokens or logits than with the ordinary cache",
    "crash": "an error that names no reason",
}
BATCHED = {
    "equal": "the tokens and logits of every request are those of its own generate() call",
    "refused": "an error by name, when the batcher is made",
    "no reference": MEANINGS["no reference"],
    "mismatch": "other tokens or logits",
    "crash": "an error that names no reason, or a refusal of what was taken before",
}
TITLES = {
    "CAUSAL_LM": "Causal language models",
    "IMAGE_TEXT_TO_TEXT": "Image and text to text",
    "SEQ_TO_SEQ_CAUSAL_LM": "Sequence to sequence",
    "SPEECH_SEQ_2_SEQ": "Speech to text",
}
COLUMNS = ("type", "class", "kinds of layers", "given", "enabled", "as it is", "why", "batched", "why not batched")


def page(lines: list[dict[str, Any]]) -> str:
    """The page as Markdown."""
    counts = Counter(line["outcome"] for line in lines)
    batched = Counter(line["batched"] for line in lines)
    ran = len(lines) - counts["no reference"]
    text = [
        "# Models",
        "",
        "Every class that transformers maps to generate(), by running it: a small random model of each in float32,",
        "three prompts of 5, 9 and 12 tokens padded on the left (encoders that listen get noise), 12 greedy tokens.",
        "Tokens and the logits of every step with a `PagedCache`, on the model as it is and after",
        "`enable_paged_attention(model)`, are held against those with the cache that generate() takes by itself (to",
        "1e-3 of the largest logit), and it is watched which way a layer's attention goes. Windows are 8 tokens long,",
        "so that they are crossed. A model that sees is given an image in each row if one of the usual forms fits it,",
        "and the image is known to change its logits; else text only, as the table tells.",
        "",
        "`python -m hf_paged.sweep` repeats it and writes this page; `--only TYPE` runs one type anew.",
        "`tests/test_sweep.py` runs a sample and fails where the page is not true. This one is of transformers",
        f"{transformers.__version__} and torch {torch.__version__.split('+')[0]}.",
        "",
        f"{len(lines)} classes, of which {ran} could be compared:",
        "",
        "| outcome | classes | |",
        "|---|---|---|",
        *(f"| {outcome} | {counts[outcome]} | {MEANINGS[outcome]} |" for outcome in OUTCOMES),
        "",
        f"Continuous batching (`generate_many`, `ContinuousBatcher`) takes {batched['equal']} of them, with text",
        "alone: the same prompts unpadded, at most 4 tokens and two rows in a step, in a pool of 8 blocks of 4 tokens.",
        "So prompts are fed in parts beside rows that decode, rows come and go, and one is preempted.",
        "",
        "| batched | classes | |",
        "|---|---|---|",
        *(f"| {outcome} | {batched[outcome]} | {meaning} |" for outcome, meaning in BATCHED.items()),
    ]
    for mapping, title in TITLES.items():
        text += ["", f"## {title}", "", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
        text += [_row(line) for line in lines if line["mapping"] == mapping]
    return "\n".join(text) + "\n"


def _row(line: dict[str, Any]) -> str:
    outcome = line["outcome"] + (f" ({line['layers']})" if line["outcome"] == "mixed" else "")
    why_not = line["batched_reason"]
    cells = line["type"], line["cls"], ", ".join(line["kinds"]), line["given"], outcome, line["plain"], line["reason"]
    return f"| {' | '.join(cell.replace('|', '/') for cell in (*cells, line['batched'], why_not))} |"


def read(text: str) -> dict[tuple[str, str], tuple[str, str, str]]:
    """What a page tells of each type and class: the outcome when enabled, as it is, and batched."""
    found = {}
    for row in text.splitlines():
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        if len(cells) == len(COLUMNS) and cells[0] not in ("type", "---"):
            found[cells[0], cells[1]] = cells[4].partition(" (")[0], cells[5], cells[7]
    return found


def write(lines: list[dict[str, Any]], path: Path = PAGE) -> None:
    """Write the page."""
    path.write_text(page(lines), encoding="utf-8")
