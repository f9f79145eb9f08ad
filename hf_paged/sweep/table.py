"""The page of models."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from hf_paged.sweep.check import OUTCOMES

PAGE = Path(__file__).parent.parent / "patches" / "MODELS.md"


def write(lines: list[dict[str, Any]], page: Path = PAGE) -> None:
    page.write_text(str(Counter(l["outcome"] for l in lines)))
