from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_fw.policies import FailureKind, decide_restart

TRANSIENT = [
    FailureKind.PROCESS_KILLED,
    FailureKind.EXCEPTION,
    FailureKind.HEARTBEAT_MISSED,
    FailureKind.AGENT_LOST,
]
PERMANENT = [FailureKind.OUT_OF_MEMORY, FailureKind.CONFIGURATION]


@pytest.mark.parametrize("failure", TRANSIENT)
def test_transient_failures_are_retried(failure: FailureKind) -> None:
    decision = decide_restart(
        failure, progressed=False, restarts_without_progress=0, max_restarts=3
    )
    assert decision.should_restart
    assert decision.restarts_without_progress == 1
    assert failure.value in decision.reason


@pytest.mark.parametrize("failure", PERMANENT)
@pytest.mark.parametrize("progressed", [True, False])
def test_permanent_failures_are_not(failure: FailureKind, progressed: bool) -> None:
    decision = decide_restart(
        failure, progressed=progressed, restarts_without_progress=0, max_restarts=3
    )
    assert not decision.should_restart


def test_progress_sets_the_count_back() -> None:
    decision = decide_restart(
        FailureKind.EXCEPTION, progressed=True, restarts_without_progress=3, max_restarts=3
    )
    assert decision.should_restart
    assert decision.restarts_without_progress == 0


@pytest.mark.parametrize("progressed", [True, False])
def test_zero_restarts_means_none(progressed: bool) -> None:
    decision = decide_restart(
        FailureKind.EXCEPTION, progressed=progressed, restarts_without_progress=0, max_restarts=0
    )
    assert not decision.should_restart


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.lists(st.booleans(), max_size=20))
def test_stops_after_max_restarts_without_progress(max_restarts: int, history: list[bool]) -> None:
    count, streak = 0, 0
    for progressed in history:
        decision = decide_restart(
            FailureKind.PROCESS_KILLED,
            progressed=progressed,
            restarts_without_progress=count,
            max_restarts=max_restarts,
        )
        streak = 0 if progressed else streak + 1
        assert decision.should_restart == (streak <= max_restarts)
        if not decision.should_restart:
            assert f"recovery.max_restarts={max_restarts}" in decision.reason
            return
        count = decision.restarts_without_progress
