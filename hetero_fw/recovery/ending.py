"""What a failure after which no attempt follows makes of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetero_fw.monitoring import Status, read_events, saves_on_line
from hetero_fw.policies import FailureKind, RestartDecision, Tier
from hetero_fw.recovery.failure import RankFailure

# What may come of a stop signal that reaches processes before they can save.
LOST = frozenset({FailureKind.PROCESS_KILLED, FailureKind.AGENT_LOST, FailureKind.HEARTBEAT_MISSED})


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How the run ends, and why."""

    status: Status
    reason: str


def judge_ending(
    failure: RankFailure,
    decision: RestartDecision,
    *,
    signal_name: str,
    killed_after_s: float | None,
    has_checkpoint: Callable[[], bool],
) -> Ending:
    """Judge a failure that nothing follows, for one of two reasons.

    Args:
        decision: what would follow if nobody had asked the run to stop.
        signal_name: of the signal that asked it to; "" if none did.
        killed_after_s: how long ranks were given since then, if that time is over.
        has_checkpoint: whether there is one to go on from.
    """
    who = f"rank {failure.rank} on {failure.node}: {failure.detail.rstrip('.')}."
    if signal_name and failure.kind in LOST:
        text = f"stopped by {signal_name} before a last checkpoint was complete"
        if killed_after_s is not None:
            text += f", killed after recovery.grace_s={killed_after_s:g}"
        return Ending(status=Status.PREEMPTED, reason=text)
    if not signal_name or not decision.should_restart:
        return Ending(status=Status.FAILED, reason=f"{who} {decision.reason}")
    # It is the signal that ends the run, wherever there is something to go on from.
    text = f"{who} It is not started again because {signal_name} came"
    if not has_checkpoint():
        return Ending(status=Status.FAILED, reason=text)
    return Ending(
        status=Status.PREEMPTED,
        reason=f"{text}; the same command goes on from the newest checkpoint",
    )


def has_checkpoint(events_path: Path) -> bool:
    """Whether the run has saved something to go on from, by its events."""
    events = read_events(events_path)
    return any(saves_on_line(events, tier) for tier in Tier)
