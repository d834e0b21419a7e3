"""Kill ranks of a running job, one after another, and time how soon it makes a step again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

NUM_KILLS = 10
NUM_RANKS = 4
# Each kill finds a few steps done since the restart, and a checkpoint among them.
STEPS_BETWEEN_KILLS = 8
START_TIMEOUT_S = 60.0
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class StepMark:
    """A completed step: of which start of the job's ranks, and when."""

    attempt: int
    step: int
    time_s: float


class Job(Protocol):
    """A job that restarts its ranks when one is killed."""

    def marks(self) -> list[StepMark]:
        """Completed steps; those that were lost may be missing."""

    def pid(self, attempt: int, rank: int) -> int:
        """Process of a rank."""

    def has_ended(self) -> bool:
        """Whether the job has given up or finished."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What followed a kill: `recovery_s` None if no step did, `next_attempt` None likewise."""

    attempt: int
    killed_time_s: float
    next_attempt: int | None = None
    recovery_s: float | None = None


def kill_rank(job: Job, kill_index: int) -> Recovery:
    """Wait for the moment of kill `kill_index`, SIGKILL a rank, wait for the next step."""
    due_step = STEPS_BETWEEN_KILLS * (kill_index + 1)
    is_due = wait_for(job, lambda: any(mark.step >= due_step for mark in job.marks()))
    assert is_due, f"the job made no step {due_step} within {START_TIMEOUT_S:.0f} s"
    attempt = job.marks()[-1].attempt
    os.kill(job.pid(attempt, kill_index % NUM_RANKS), signal.SIGKILL)
    killed_time_s = time.time()
    wait_for(job, lambda: job.marks()[-1].attempt > attempt)
    after = [mark for mark in job.marks() if mark.attempt > attempt]
    if not after:
        return Recovery(attempt=attempt, killed_time_s=killed_time_s)
    return Recovery(
        attempt=attempt,
        killed_time_s=killed_time_s,
        next_attempt=after[0].attempt,
        recovery_s=after[0].time_s - killed_time_s,
    )


def wait_for(job: Job, condition: Callable[[], bool]) -> bool:
    """Poll until `condition` holds (True), or the job ends or a time limit passes (False)."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if job.has_ended() or time.monotonic() > deadline_s:
            return condition()
        time.sleep(_POLL_S)
    return True
