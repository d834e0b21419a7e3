"""What failures and checkpoints cost, worked out from the event log and the steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hetero_fw.monitoring.events import EventName
from hetero_fw.monitoring.history import Row, RunHistory


def count(events: Iterable[Row], name: EventName) -> int:
    """How often it happened: what several ranks report about one step counts once."""
    num_reports: Counter[tuple[int, int | None, int | None]] = Counter()
    seen = set()
    for event in events:
        if event["event"] == name:
            attempt, step = event["attempt"], event.get("step")
            reporter = (attempt, step, event.get("rank"))
            num_reports[reporter] += 1
            seen.add((attempt, step, num_reports[reporter]))
    return len(seen)


def failure_times_s(events: Iterable[Row]) -> dict[int, float]:
    """When each failed attempt failed, by its number.

    That is `failed_time_s` if the event says so, else when the failure was noticed, or when the
    fault was injected, whichever came first.
    """
    injected_s: dict[int, float] = {}
    failed_s: dict[int, float] = {}
    for event in events:
        attempt = event["attempt"]
        if event["event"] == EventName.FAILURE_INJECTED:
            injected_s[attempt] = event["time_s"]
        elif event["event"] == EventName.FAILURE_DETECTED:
            times_s = (
                event.get("failed_time_s") or event["time_s"],
                injected_s.get(attempt, event["time_s"]),
                failed_s.get(attempt, event["time_s"]),
            )
            failed_s[attempt] = min(times_s)
    return failed_s


def recovery_times_s(history: RunHistory) -> list[float]:
    """Seconds from each failure to the next step that a later attempt completed.

    Failures that one attempt reports several times count once, from the earliest. One that ended
    the run is left out, also if someone continued the run later.
    """
    completed = sorted(
        (row["time_s"], row["attempt"]) for row in (*history.steps, *history.lost_steps)
    )
    ends_s = [event["time_s"] for event in history.events if event["event"] == EventName.RUN_END]
    recoveries = []
    for attempt, failed_s in sorted(failure_times_s(history.events).items()):
        later = (time_s for time_s, by in completed if by > attempt and time_s > failed_s)
        next_s = next(later, None)
        if next_s is not None and not any(failed_s < end_s < next_s for end_s in ends_s):
            recoveries.append(next_s - failed_s)
    return recoveries


def checkpoint_stalls_s(events: Iterable[Row]) -> list[float]:
    """Seconds each checkpoint held training up: the worst rank's, in order.

    Taken from `stall_s` of an event of the checkpoint, else from the time between its
    `checkpoint_started` and `checkpoint_staged`.
    """
    started_s: dict[tuple[int, int, int | None], float] = {}
    stalls_s: dict[tuple[int, int], float] = {}
    for event in events:
        checkpoint = (event["attempt"], event.get("step") or 0)
        by_rank = (*checkpoint, event.get("rank"))
        stall_s = event.get("stall_s")
        if event["event"] == EventName.CHECKPOINT_STARTED:
            started_s[by_rank] = event["time_s"]
        elif event["event"] == EventName.CHECKPOINT_STAGED and stall_s is None:
            stall_s = event["time_s"] - started_s.get(by_rank, event["time_s"])
        if str(event["event"]).startswith("checkpoint_") and isinstance(stall_s, int | float):
            stalls_s[checkpoint] = max(stalls_s.get(checkpoint, 0.0), float(stall_s))
    return list(stalls_s.values())
