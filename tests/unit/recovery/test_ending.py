from __future__ import annotations

import pytest

from hetero_fw.monitoring import Status
from hetero_fw.policies import FailureKind, RestartDecision, decide_restart
from hetero_fw.recovery.ending import Ending, judge_ending
from hetero_fw.recovery.failure import RankFailure


def ending(
    kind: FailureKind = FailureKind.EXCEPTION,
    *,
    progressed: bool = True,
    signal_name: str = "SIGTERM",
    killed_after_s: float | None = None,
    has_checkpoint: bool = True,
) -> Ending:
    decision: RestartDecision = decide_restart(
        kind, progressed=progressed, restarts_without_progress=3, max_restarts=3
    )
    return judge_ending(
        RankFailure(rank=1, node="v100-0", kind=kind, time_s=0.0, detail="OSError: broken."),
        decision,
        signal_name=signal_name,
        killed_after_s=killed_after_s,
        has_checkpoint=lambda: has_checkpoint,
    )


def test_a_signal_that_prevents_a_restart_preempts_the_run() -> None:
    end = ending()
    assert end.status is Status.PREEMPTED
    assert end.reason == (
        "rank 1 on v100-0: OSError: broken. It is not started again because SIGTERM came; the "
        "same command goes on from the newest checkpoint"
    )


def test_without_a_checkpoint_the_run_has_failed_and_the_signal_is_named() -> None:
    end = ending(has_checkpoint=False)
    assert end.status is Status.FAILED
    assert end.reason.endswith("broken. It is not started again because SIGTERM came")


@pytest.mark.parametrize("kind", [FailureKind.EXCEPTION, FailureKind.CONFIGURATION])
def test_what_no_restart_would_help_is_a_failure_with_a_signal_too(kind: FailureKind) -> None:
    end = ending(kind, progressed=False)
    assert end.status is Status.FAILED
    assert "SIGTERM" not in end.reason
    assert end == ending(kind, progressed=False, signal_name="")


def test_what_a_signal_may_bring_about_itself_is_no_failure() -> None:
    end = ending(FailureKind.PROCESS_KILLED, has_checkpoint=False, killed_after_s=2.5)
    assert end.status is Status.PREEMPTED
    assert end.reason == (
        "stopped by SIGTERM before a last checkpoint was complete, killed after "
        "recovery.grace_s=2.5"
    )
    assert ending(FailureKind.PROCESS_KILLED, signal_name="").status is Status.FAILED
