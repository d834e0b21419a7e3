"""Last words of a rank: why it ended, in a file that survives it."""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from hetero_fw.errors import ConfigError
from hetero_fw.policies import FailureKind
from hetero_fw.profiling import is_out_of_memory

_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """Why a rank ended.

    Attributes:
        time_s: wall-clock time of the failure.
        detail: one line for people.
        trace: the traceback, empty for a killed process.
    """

    rank: int
    node: str
    kind: FailureKind
    time_s: float
    detail: str
    trace: str = ""


def classify_exception(error: BaseException) -> FailureKind:
    """What kind of failure an exception in a rank stands for."""
    if isinstance(error, ConfigError):
        return FailureKind.CONFIGURATION
    if is_out_of_memory(error):
        return FailureKind.OUT_OF_MEMORY
    return FailureKind.EXCEPTION


def one_line(text: str) -> str:
    """What an error says, in one line; of a traceback that it carries the first and last lines.

    A DataLoader passes the traceback of its worker on as text.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(_TRACEBACK in line for line in lines):
        lines = [lines[0], lines[-1]]
    return " ".join(lines)


def write_failure(
    folder: Path, error: BaseException, *, rank: int, node: str, time_s: float
) -> None:
    """Leave a report of `error` in `folder`, whole or not at all."""
    failure = RankFailure(
        rank=rank,
        node=node,
        kind=classify_exception(error),
        time_s=time_s,
        detail=one_line(f"{type(error).__name__}: {error}"),
        trace="".join(traceback.format_exception(error)),
    )
    folder.mkdir(exist_ok=True)  # without parents: a run directory that is gone is not made again
    path = folder / f"failure-{rank}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(failure)))
    temporary.replace(path)


def read_failures(folder: Path) -> list[RankFailure]:
    """All reports in `folder`, earliest first: the first is the cause, the rest follow from it."""
    reports = []
    for path in folder.glob("failure-*.json"):
        try:
            data = json.loads(path.read_text())
            reports.append(RankFailure(**{**data, "kind": FailureKind(data["kind"])}))
        except (ValueError, TypeError, KeyError):
            # Torn, by a full disk say: the rank's end is known all the same.
            continue
    return sorted(reports, key=lambda report: report.time_s)
