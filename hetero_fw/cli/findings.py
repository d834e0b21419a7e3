"""What `hetero doctor` finds, as data and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How a finding is to be taken."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        remedy: what to do about it; empty if nothing has to be done.
    """

    subject: str
    detail: str
    level: Level = Level.OK
    remedy: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def format_findings(findings: Sequence[Finding]) -> str:
    """A line for each finding, its remedy below it, and the verdict."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<8} {finding.subject:<{width}}  {finding.detail}")
        if finding.remedy:
            lines.append(f"{'':<8} {'':<{width}}  -> {finding.remedy}")
    num_problems = sum(finding.level is Level.PROBLEM for finding in findings)
    verdict = "ready to train" if num_problems == 0 else f"{num_problems} to solve before training"
    return "\n".join([*lines, "", verdict])
