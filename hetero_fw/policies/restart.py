"""Whether to start a new attempt after a failure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FailureKind(StrEnum):
    """How an attempt ended."""

    PROCESS_KILLED = "process_killed"
    EXCEPTION = "exception"
    HEARTBEAT_MISSED = "heartbeat_missed"
    AGENT_LOST = "agent_lost"
    OUT_OF_MEMORY = "out_of_memory"
    CONFIGURATION = "configuration"


# The same configuration meets the same end, however often it is tried.
PERMANENT = frozenset({FailureKind.OUT_OF_MEMORY, FailureKind.CONFIGURATION})


@dataclass(frozen=True, kw_only=True)
class RestartDecision:
    """What to do, the new count of restarts without progress, and why."""

    should_restart: bool
    restarts_without_progress: int
    reason: str


def decide_restart(
    failure: FailureKind, *, progressed: bool, restarts_without_progress: int, max_restarts: int
) -> RestartDecision:
    """Restart unless the failure is permanent or restarts no longer help.

    Args:
        failure: how the attempt ended.
        progressed: the attempt got past the step where the one before it ended; this sets the
            count back to 0.
        restarts_without_progress: the count that the decision before this one returned, or 0.
        max_restarts: `recovery.max_restarts`; 0 never restarts.
    """
    if failure in PERMANENT:
        return _stop(restarts_without_progress, f"{failure}: a restart would fail in the same way")
    if max_restarts <= 0:
        return _stop(restarts_without_progress, f"{failure}: recovery.max_restarts={max_restarts}")
    if progressed:
        return RestartDecision(
            should_restart=True,
            restarts_without_progress=0,
            reason=f"{failure} after progress, restarts without progress are 0 of {max_restarts}",
        )
    count = restarts_without_progress + 1
    if count > max_restarts:
        return _stop(
            restarts_without_progress,
            f"{failure}: {restarts_without_progress} restarts in a row made no progress "
            f"(recovery.max_restarts={max_restarts})",
        )
    return RestartDecision(
        should_restart=True,
        restarts_without_progress=count,
        reason=f"{failure}, restart {count} of {max_restarts} without progress",
    )


def _stop(restarts_without_progress: int, reason: str) -> RestartDecision:
    return RestartDecision(
        should_restart=False, restarts_without_progress=restarts_without_progress, reason=reason
    )
