from __future__ import annotations

from typing import Any

from hetero_fw.monitoring import attempt_starts, saves_on_line
from hetero_fw.policies import AttemptStart


def event(name: str, attempt: int, step: int | None = None, **fields: Any) -> dict[str, Any]:
    return {"time_s": 1.0, "attempt": attempt, "step": step, "event": name, **fields}


def committed(attempt: int, step: int, tier: str = "local") -> dict[str, Any]:
    return event("checkpoint_committed", attempt, step, tier=tier)


EVENTS = [
    event("attempt_start", 0),
    event("attempt_start", 0),
    committed(0, 50),
    committed(0, 50, "storage"),
    committed(0, 90),
    event("attempt_start", 1),
    event("restored", 1, 50),
    committed(1, 60, "storage"),
    event("attempt_start", 2),
    event("restored", 2, 60),
    committed(2, 60, "storage"),  # what it has restored, brought to another tier
]


def test_where_attempts_went_on_from() -> None:
    assert attempt_starts(EVENTS) == (
        AttemptStart(attempt=0, start_step=0, has_saved=True),
        AttemptStart(attempt=1, start_step=50, has_saved=True),
        AttemptStart(attempt=2, start_step=60, has_saved=False),
    )


def test_an_attempt_whose_beginning_is_not_in_the_log_is_not_known() -> None:
    assert attempt_starts([committed(3, 10), *EVENTS[5:8]]) == (
        AttemptStart(attempt=1, start_step=50, has_saved=True),
    )


def test_saves_that_were_left_behind_are_left_out() -> None:
    assert [item["step"] for item in saves_on_line(EVENTS, "local")] == [50]
    assert [item["step"] for item in saves_on_line(EVENTS, "storage")] == [50, 60, 60]
    assert [item["step"] for item in saves_on_line(EVENTS[:5], "local")] == [50, 90]
