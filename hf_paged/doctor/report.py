"""What `hf-paged doctor` shows of a `Diagnosis`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from hf_paged.doctor.findings import Diagnosis, Status

if TYPE_CHECKING:
    from rich.console import Console

MARKS = {
    Status.ok: ("✓ ok", "green"),
    Status.note: ("· note", "cyan"),
    Status.warning: ("! warning", "yellow"),
    Status.failed: ("✗ failed", "bold red"),
}


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """A line for each finding, with what to do below it, and a last line that sums up."""
    width = max(len(finding.name) for finding in diagnosis.findings)
    for section, findings in diagnosis.sections.items():
        table = Table(title=f"\n{section}", title_justify="left", title_style="bold", box=None, pad_edge=False)
        table.show_header = False
        table.add_column(width=max(len(mark) for mark, _ in MARKS.values()), no_wrap=True)
        table.add_column(width=min(width, 24))
        table.add_column(overflow="fold")
        for finding in findings:
            text = Text(finding.text)
            if finding.advice:
                text.append(f"\n→ {finding.advice}", "cyan")
            table.add_row(Text(*MARKS[finding.status]), finding.name, text)
        console.print(table, highlight=False)
    counts = Counter(finding.status for finding in diagnosis.findings)
    parts = [f"{counts[status]} {status}" for status in Status if counts[status]]
    if counts[Status.failed]:
        verdict, style = "Something is wrong", "bold red"
    elif counts[Status.warning]:
        verdict, style = "It works, with something to mend", "yellow"
    else:
        verdict, style = "All is well", "green"
    console.print(Text(f"\n{verdict}: {', '.join(parts)}.", style))
