"""What a check says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    ok = "ok"
    note = "note"
    """Nothing is wrong, and there is something to know, such as an optional package that is not installed."""
    warning = "warning"
    failed = "failed"


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        name: what was looked at.
        text: what was found.
        advice: what to do; empty where there is nothing to do.
    """

    name: str
    status: Status
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All findings, by section."""

    sections: Mapping[str, tuple[Finding, ...]]

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for section in self.sections.values() for finding in section)

    @property
    def passed(self) -> bool:
        """Whether no check failed; warnings are none."""
        return all(finding.status is not Status.failed for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The same as dicts and lists, for JSON."""
        return {
            "passed": self.passed,
            "sections": {name: [asdict(finding) for finding in found] for name, found in self.sections.items()},
        }
