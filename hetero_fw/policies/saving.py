"""Whether to save after this step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hetero_fw.policies.interval import IntervalDecision


class Tier(StrEnum):
    """Where a checkpoint goes, nearest first. Each tier has its own costs and interval."""

    LOCAL = "local"
    STORAGE = "storage"


@dataclass(frozen=True, kw_only=True)
class SaveObservation:
    """Where the run stands at a step boundary.

    Attributes:
        step: optimizer steps completed.
        last_saved_step: step of the last save that was started or restored from; 0 for neither.
        interval: what `decide_interval` chose.
        is_final: no step follows this one.
        save_in_flight: a save of this or any other rank is still being written.
        num_postponed: steps in a row for which this save has been postponed.
        num_failed: saves in a row that failed; the last of them was of `last_failed_step`.
    """

    step: int
    last_saved_step: int
    interval: IntervalDecision
    is_final: bool = False
    save_in_flight: bool = False
    num_postponed: int = 0
    num_failed: int = 0
    last_failed_step: int = 0


@dataclass(frozen=True, kw_only=True)
class SaveDecision:
    """Whether to save now. `is_postponed`: one is due but must wait for the one in flight."""

    save: bool
    reason: str
    is_postponed: bool = False


def decide_save(observed: SaveObservation) -> SaveDecision:
    """Save when the interval is over and at the final step, never while a save is in flight.

    A postponed save is due again at the next step; at the final step the caller waits for the
    save in flight and asks once more. After a save that failed the next one comes 2 steps later,
    then 4, 8 and so on, up to the interval: what it would have kept is not safe yet.
    """
    due = _due(observed)
    if due is None:
        return SaveDecision(save=False, reason="no save is due")
    if observed.save_in_flight:
        return SaveDecision(
            save=False, is_postponed=True, reason=f"postponed, the last save is in flight: {due}"
        )
    if observed.num_postponed:
        due += f"; postponed {observed.num_postponed} steps by the save before"
    return SaveDecision(save=True, reason=due)


def _due(observed: SaveObservation) -> str | None:
    interval_steps = observed.interval.interval_steps
    steps_since = observed.step - observed.last_saved_step
    if interval_steps is None or steps_since <= 0:
        return None
    if observed.is_final:
        return f"final step {observed.step}"
    if observed.num_failed:
        return _due_again(observed, interval_steps)
    if steps_since >= interval_steps:
        return f"{steps_since} steps since step {observed.last_saved_step}; " + (
            observed.interval.reason
        )
    return None


def _due_again(observed: SaveObservation, interval_steps: int) -> str | None:
    wait_steps = min(interval_steps, 2 ** min(observed.num_failed, 30))
    if observed.step - observed.last_failed_step < wait_steps:
        return None
    if observed.num_failed == 1:
        return f"the save of step {observed.last_failed_step} has failed"
    return (
        f"{observed.num_failed} saves in a row have failed, the last of step "
        f"{observed.last_failed_step}"
    )
