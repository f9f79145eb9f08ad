"""Sizes as people type and read them: GB are 10^9 bytes, GiB are 2^30."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(?:([KMGT])(i?))?(B?)", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int:
    """Bytes in `text`: `"80GiB"`, `"40 GB"`, `"250KB"`, `"1.5GiB"`, or a plain number of bytes.

    Raises:
        ValueError: it is no size, or its unit is neither decimal nor binary, such as `80G`.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found or (found[2] and not found[4]):
        raise ValueError(f"'{text}' is no size; write one such as 40GB (10^9 bytes), 80GiB (2^30) or 250KB")
    base = 1024 if found[3] else 1000
    return round(float(found[1]) * base ** _POWERS[(found[2] or "").upper()])


def is_binary(text: str) -> bool:
    """Whether a size was typed in KiB, MiB, GiB or TiB."""
    return text.strip().lower().endswith("ib")


def format_size(nbytes: float, binary: bool = True) -> str:
    """`nbytes` with three or four digits and a unit: GiB and the like, or GB and the like."""
    base, end = (1024, "iB") if binary else (1000, "B")
    value = float(nbytes)
    for unit in ("", "K", "M", "G"):
        if abs(value) < base:
            return f"{value:.0f} B" if not unit else f"{_short(value)} {unit}{end}"
        value /= base
    return f"{_short(value)} T{end}"


def _short(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"
