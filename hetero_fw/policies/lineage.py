"""Which checkpoints the run still descends from, where attempts went on from older ones."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AttemptStart:
    """Where an attempt went on from.

    Attributes:
        start_step: of the checkpoint that it restored; 0 if it restored none.
        has_saved: whether it committed a checkpoint of a later step.
    """

    attempt: int
    start_step: int
    has_saved: bool


@dataclass(frozen=True, kw_only=True)
class Departure:
    """That a later attempt left a checkpoint behind, from `start_step` on, and in words."""

    attempt: int
    start_step: int
    reason: str


def find_departure(step: int, saved_by: int, starts: Collection[AttemptStart]) -> Departure | None:
    """Why the checkpoint of `step` by attempt `saved_by` is not on the line of the run.

    A later attempt that went on from before `step` has left it behind: its own steps are the run
    since then, with whatever was changed for them, and `metrics.csv` tells of them. Only an
    attempt that has saved something has done so. One that died before that has nothing to lose,
    and what it could not use (a node that did not answer, a file that was damaged just then) may
    well be the best there is now.

    For the same reason a checkpoint that was left behind is not worthless: if nothing can be read
    any more of what came in its place, going on from it loses less than going back before it. So
    this is an order to try checkpoints in: those of the latest attempt that has saved any first,
    the newest of them first, then those of the attempt before, and so on. A search that goes from
    step to step downwards, and puts off what has departed until it comes to `start_step`, keeps
    to that order.

    Args:
        starts: what is known of attempts. One of which nothing is known has left nothing behind,
            so that without any record the newest step comes first.

    Returns:
        The departure from the oldest step, if there are several; None if it is on the line.
    """
    left = [
        start
        for start in starts
        if start.has_saved and start.attempt > saved_by and start.start_step < step
    ]
    if not left:
        return None
    first = min(left, key=lambda start: (start.start_step, start.attempt))
    went = f"went on from step {first.start_step}" if first.start_step else "began at step 0"
    return Departure(
        attempt=first.attempt,
        start_step=first.start_step,
        reason=f"step {step} of attempt {saved_by} is passed over: attempt {first.attempt} {went}",
    )
