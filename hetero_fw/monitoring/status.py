"""`status.json`: where a run stands, for whoever looks from outside."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hetero_fw.monitoring.atomic_file import write_json_atomically


class Status(StrEnum):
    """State of a run."""

    RUNNING = "RUNNING"
    DONE = "DONE"
    PREEMPTED = "PREEMPTED"
    FAILED = "FAILED"


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """What `status.json` says.

    Attributes:
        step: last optimizer step that is known to be complete.
        attempt: number of the newest attempt.
        reason: one sentence, empty while nothing is worth saying.
    """

    status: Status
    step: int
    attempt: int
    reason: str = ""


def write_status(path: Path, status: Status, step: int, attempt: int, reason: str = "") -> None:
    """Replace the status in one step; readers never see half of it."""
    record = {"status": Status(status).value, "step": step, "attempt": attempt, "reason": reason}
    write_json_atomically(path, record)


def read_status(path: Path) -> RunStatus | None:
    """The status, or None if there is none that can be read."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        return RunStatus(
            status=Status(record["status"]),
            step=int(record["step"]),
            attempt=int(record["attempt"]),
            reason=str(record["reason"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
