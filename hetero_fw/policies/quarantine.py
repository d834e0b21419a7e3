"""When a checkpoint whose bytes are sound is to blame for a training that diverges."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

# A restored state that is broken shows it at once; what comes later is training's own doing.
WATCHED_STEPS = 5
# Once can be a fault of the hardware, which a restart mends.
TOLERATED_ATTEMPTS = 1


@dataclass(frozen=True, kw_only=True)
class RestoredTraining:
    """A step that was finished after a restore.

    Attributes:
        restored_step: step of the checkpoint.
        step: the finished one.
        loss: of that step.
        attempt: number of this attempt.
        earlier_attempts: those that diverged after they restored the same checkpoint.
    """

    restored_step: int
    step: int
    loss: float
    attempt: int
    earlier_attempts: Collection[int] = ()


@dataclass(frozen=True, kw_only=True)
class DivergenceDecision:
    """Whether to end the attempt and to hold that against the checkpoint, and why."""

    is_divergence: bool
    reason: str


def decide_divergence(observed: RestoredTraining) -> DivergenceDecision:
    """A loss that is not finite within a few steps of a restore ends the attempt.

    The first attempt that this happens to leaves the checkpoint in use; after the second one it
    is quarantined (`is_quarantined`).
    """
    distance = observed.step - observed.restored_step
    if math.isfinite(observed.loss):
        return DivergenceDecision(is_divergence=False, reason="the loss is finite")
    if distance > WATCHED_STEPS:
        return DivergenceDecision(
            is_divergence=False,
            reason=f"{distance} steps after the restore the checkpoint is not to blame",
        )
    what = (
        f"the loss of step {observed.step} is {observed.loss:g}, {distance} steps after the "
        f"checkpoint of step {observed.restored_step} was restored"
    )
    others = sorted(set(observed.earlier_attempts) - {observed.attempt})
    if is_quarantined({*others, observed.attempt}):
        return DivergenceDecision(
            is_divergence=True,
            reason=f"{what}, as in attempts {others}; it is quarantined, an older one is next",
        )
    return DivergenceDecision(
        is_divergence=True, reason=f"{what}; it is tried once more before it is quarantined"
    )


def is_quarantined(attempts: Collection[int]) -> bool:
    """Whether training diverged in so many attempts that the checkpoint is not used again."""
    return len(set(attempts)) > TOLERATED_ATTEMPTS
