"""The event log: what happened in a run, one JSON object a line, appended by every process."""

from __future__ import annotations

import json
import os
import time
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hetero_fw.errors import did_you_mean
from hetero_fw.monitoring.atomic_file import without_nonfinite


class EventName(StrEnum):
    """Everything that can happen. Scripts rely on these names."""

    ATTEMPT_START = "attempt_start"
    PLAN = "plan"
    RESTORED = "restored"
    CHECKPOINT_POSTPONED = "checkpoint_postponed"
    CHECKPOINT_STARTED = "checkpoint_started"
    CHECKPOINT_STAGED = "checkpoint_staged"
    CHECKPOINT_COMMITTED = "checkpoint_committed"
    CHECKPOINT_FAILED = "checkpoint_failed"
    CHECKPOINT_DELETED = "checkpoint_deleted"
    CHECKPOINT_REJECTED = "checkpoint_rejected"
    EMERGENCY_SAVE = "emergency_save"
    FAILURE_DETECTED = "failure_detected"
    FAILURE_INJECTED = "failure_injected"
    RESTART = "restart"
    REPLAN = "replan"
    ROLLBACK = "rollback"
    STEP_SKIPPED = "step_skipped"
    WRITER_RESTART = "writer_restart"
    HEARTBEAT_MISSED = "heartbeat_missed"
    ATTEMPT_END = "attempt_end"
    RUN_END = "run_end"


_FIXED_FIELDS = frozenset({"time_s", "attempt", "rank", "step", "event"})


class EventLog:
    """Appends events to one file. Any number of processes may hold one for the same file.

    Args:
        path: `events.jsonl` of the run.
        attempt: number of the attempt that the writer belongs to.
        rank: rank of the writer, None for the supervisor.

    A line is one write to a file opened for appending, so lines of several processes never mix.
    `write` blocks only for that system call and may be called from any thread.
    """

    def __init__(self, path: Path, attempt: int, rank: int | None = None) -> None:
        self.path = Path(path)
        self.attempt = attempt
        self.rank = rank
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o644)
        self._end_torn_line()

    def _end_torn_line(self) -> None:
        # A writer killed in the middle of a line must not swallow the next one. Two processes may
        # both repair it; readers skip the empty line.
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def write(self, event: EventName | str, step: int | None = None, **fields: Any) -> None:
        """Append one event.

        Args:
            event: one of `EventName`.
            step: the optimizer step it is about, if any.
            fields: anything else worth knowing, as JSON values; nan and infinities become strings,
                other types their `str`.

        Raises:
            ValueError: the name is not an event, or a field hides one of the fixed ones.
            OSError: the line could not be written in full.
        """
        hidden = _FIXED_FIELDS & fields.keys()
        if hidden:
            raise ValueError(f"{event}: {sorted(hidden)} are set by the log; choose other names")
        record = {
            "time_s": time.time(),
            "attempt": self.attempt,
            "rank": self.rank,
            "step": step,
            "event": _event_name(event).value,
            **fields,
        }
        text = json.dumps(without_nonfinite(record), allow_nan=False, default=str)
        line = text.encode() + b"\n"
        num_written = os.write(self._descriptor, line)
        if num_written != len(line):
            self._end_torn_line()
            raise OSError(f"{self.path}: {num_written} of {len(line)} bytes of an event written")

    def close(self) -> None:
        """Close the file. Harmless when called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events in file order. Lines that a killed writer left torn are skipped.

    Returns:
        An empty list if the file does not exist.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [event for line in lines if (event := _parse(line)) is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_event = isinstance(record, dict) and "event" in record and "time_s" in record
    return record if is_event else None


def _event_name(event: EventName | str) -> EventName:
    try:
        return EventName(event)
    except ValueError:
        hint = did_you_mean(str(event), [name.value for name in EventName])
        raise ValueError(
            f"{event!r} is not an event.{hint} Events: {', '.join(EventName)}."
        ) from None
