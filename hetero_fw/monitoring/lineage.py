"""Where the attempts of a run went on from, worked out from its event log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hetero_fw.monitoring.events import EventName
from hetero_fw.monitoring.history import Row
from hetero_fw.monitoring.saves import committed_saves
from hetero_fw.policies import AttemptStart, find_departure


def attempt_starts(events: Iterable[Row]) -> tuple[AttemptStart, ...]:
    """Every attempt whose beginning the log knows; of others it cannot tell what they restored."""
    begun: set[int] = set()
    restored: dict[int, int] = {}
    saved: dict[int, int] = {}
    for event in events:
        attempt, step = event["attempt"], event.get("step") or 0
        if event["event"] == EventName.ATTEMPT_START:
            begun.add(attempt)
        elif event["event"] == EventName.RESTORED:
            restored[attempt] = step
        elif event["event"] == EventName.CHECKPOINT_COMMITTED:
            saved[attempt] = max(step, saved.get(attempt, 0))
    return tuple(
        AttemptStart(
            attempt=attempt,
            start_step=restored.get(attempt, 0),
            has_saved=saved.get(attempt, 0) > restored.get(attempt, 0),
        )
        for attempt in sorted(begun)
    )


def saves_on_line(events: Sequence[Row], tier: str) -> list[Row]:
    """As `committed_saves`, without those that a later attempt has left behind."""
    starts = attempt_starts(events)
    return [
        event
        for event in committed_saves(events, tier)
        if find_departure(event["step"], event["attempt"], starts) is None
    ]
