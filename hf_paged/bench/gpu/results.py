"""What is recorded of a measurement, and how all of it is told: in a line, in JSON, in a Markdown table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SECTIONS = ("machine", "compile", "correctness", "decode", "sweep", "blocks", "prefill", "generate", "batching")
HOW_TO_READ = {
    "correctness": (
        "Errors are against attention in float64 over the same keys and values. A case passes if its output has no "
        "NaN, is zero at padding and in empty rows, is off by at most `allowed` (in every row: twice the error of "
        "torch's SDPA in the same dtype, or epsilon times the largest weighted mean of the values' magnitudes, "
        "whichever is larger; shown for the row that comes closest), and by at most two epsilons in the root mean "
        "square relative to the output's."
    ),
    "decode": (
        "`us` is microseconds a call, in a CUDA graph over as many layers as are needed to read more than the caches "
        "hold; `us_without_graph` is the same, launched call by call. `share_of_copy` is bytes of keys and values of "
        "the rows' tokens, each counted once, over the time of a call (the joining of splits included), divided by the "
        "copy bandwidth, which is bytes read plus bytes written a second of a copy within the device."
    ),
    "sweep": "Decode in a graph as above, cut otherwise than by the rule; the rule's own choice is the last of each.",
    "blocks": "GB/s of moves count bytes read plus bytes written; decode is as above.",
    "prefill": "TFLOP/s count 4 * heads * head dim * L * (L + 1) / 2 a row of L tokens.",
    "generate": (
        "`step_ms` is the median time between two tokens of a row, `tokens_per_s` tokens of all rows over the time "
        "from the first token to the last, `total_s` the whole call. `peak_mb` leaves out the weights. `equal_tokens` "
        "is the share of new tokens that DynamicCache gave, too: ties in bfloat16 may go either way."
    ),
    "batching": (
        "Ragged prompts with answers of unequal lengths: `tokens_per_s` is new tokens that were asked for over the "
        "whole time. Padded generate() runs 32 rows at a time, each batch to its longest answer."
    ),
}


@dataclass(frozen=True)
class Target:
    """What a figure should reach."""

    text: str
    met: bool


@dataclass
class Result:
    """One line of the report: exactly one of `values`, `skipped` and `error` says something.

    Attributes:
        values: figures by name; the names carry the units.
        skipped: why this was not measured.
        error: what was raised.
        passed: of a correctness case.
        seconds: how long the measurement took, preparations included.
    """

    section: str
    name: str
    values: dict[str, Any] = field(default_factory=dict)
    skipped: str | None = None
    error: str | None = None
    passed: bool | None = None
    target: Target | None = None
    seconds: float = 0.0

    @property
    def remark(self) -> str:
        """What is to be said besides the figures."""
        if self.error is not None:
            return f"ERROR: {self.error}"
        if self.skipped is not None:
            return f"skipped: {self.skipped}"
        if self.passed is not None:
            return "passed" if self.passed else "FAILED"
        if self.target is not None:
            return f"{self.target.text}: {'met' if self.target.met else 'NOT MET'}"
        return ""

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {_show(value)}" for name, value in self.values.items())
        return f"[{self.section}] {self.name}: {figures}{'; ' if figures and self.remark else ''}{self.remark}"


def markdown(about: Mapping[str, Any], results: Sequence[Result]) -> str:
    """The results, one table a section."""
    lines = ["# GPU results", ""]
    lines += [f"- {name}: {_show(value)}" for name, value in about.items()]
    for section in SECTIONS:
        rows = [result for result in results if result.section == section]
        if not rows:
            continue
        columns = list(dict.fromkeys(name for result in rows for name in result.values))
        lines += ["", f"## {section}", ""]
        if section in HOW_TO_READ:
            lines += [HOW_TO_READ[section], ""]
        lines.append("| " + " | ".join(["", *columns, "remark"]) + " |")
        lines.append("|" + " --- |" * (len(columns) + 2))
        for result in rows:
            cells = [_show(result.values[name]) if name in result.values else "" for name in columns]
            lines.append("| " + " | ".join(_cell(c) for c in [result.name, *cells, result.remark]) + " |")
    return "\n".join(lines) + "\n"


def plain(value: Any) -> Any:
    """What JSON can express: NaN and infinity as words."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_show(item)}" for name, item in value.items())
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
