"""A discrete-event simulation of training with checkpoints on a cluster that fails."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetero_fw.policies import IntervalDecision, SaveObservation, decide_save
from hetero_fw.simulate.choosers import Chooser, Moment, SaveMeasurement
from hetero_fw.simulate.failures import Failure, StepFunction


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    """What steps, saves and restarts take.

    Attributes:
        step_s: one optimizer step.
        cost_s: what a save costs training, stall and slowdown together, by the time it starts.
        persist_s: from the end of a stall until the save is durable. Training goes on.
        restart_s: from a failure to the next step.
    """

    step_s: float
    cost_s: StepFunction
    persist_s: float
    restart_s: float


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """Where the time went; the four parts add up to the simulated time.

    Attributes:
        useful_s: training that was kept.
        saving_s: cost of saves; `lost_s` training that failures undid; `restart_s` restarts.
        intervals: (time, steps) of every save and the interval that made it due.
    """

    useful_s: float
    saving_s: float
    lost_s: float
    restart_s: float
    num_failures: int
    intervals: tuple[tuple[float, int], ...]

    @property
    def waste_s(self) -> float:
        """What the choice of intervals decides: saves and lost training, without restarts."""
        return self.saving_s + self.lost_s


def simulate_run(
    job: SimulatedJob, failures: Sequence[Failure], chooser: Chooser, end_s: float
) -> SimulatedRun:
    """Train from 0 to `end_s` seconds.

    Args:
        job: what everything takes.
        failures: in order of time; the job fails then, whatever it does.
        chooser: asked at step boundaries.
        end_s: when the simulation ends. What is not saved by then counts as kept.
    """
    return _Simulation(job, failures, chooser, end_s).run()


class _Simulation:
    def __init__(
        self, job: SimulatedJob, failures: Sequence[Failure], chooser: Chooser, end_s: float
    ) -> None:
        self._job = job
        self._failures = failures
        self._failures_s = [failure.time_s for failure in failures]
        self._chooser = chooser
        self._end_s = end_s
        self._time_s = self._began_s = 0.0
        self._step = self._last_saved_step = self._durable_step = 0
        self._partial_s = 0.0  # of the step that a failure or the end cut short
        self._in_flight: tuple[int, float, float] | None = None  # step, durable at, cost
        self._saving_s = self._lost_s = self._restart_s = 0.0
        self._num_failures = 0
        self._intervals: list[tuple[float, int]] = []

    def run(self) -> SimulatedRun:
        while (failure := self._next_failure()) is not None:
            self._attempt(failure.time_s)
            self._fail(failure)
        self._attempt(self._end_s)
        return SimulatedRun(
            useful_s=self._step * self._job.step_s + self._partial_s,
            saving_s=self._saving_s,
            lost_s=self._lost_s,
            restart_s=self._restart_s,
            num_failures=self._num_failures,
            intervals=tuple(self._intervals),
        )

    def _next_failure(self) -> Failure | None:
        index = bisect.bisect_right(self._failures_s, self._time_s)
        if index == len(self._failures) or self._failures_s[index] >= self._end_s:
            return None
        return self._failures[index]

    def _attempt(self, stop_s: float) -> None:
        """Restart if there was a failure, then train and save until `stop_s`."""
        self._began_s = self._time_s
        if self._num_failures:
            self._restart_s += self._spend(self._job.restart_s, stop_s)
        while self._time_s < stop_s:
            self._collect()
            interval = self._chooser.interval(self._moment())
            self._save_if_due(interval, stop_s)
            self._train(self._steps_to_next_event(interval), stop_s)

    def _spend(self, duration_s: float, stop_s: float) -> float:
        """Let time pass, no further than `stop_s`; returns how much of it did."""
        spent_s = min(duration_s, stop_s - self._time_s)
        # Not a sum: rounding must not leave the clock just short of where the attempt stops.
        self._time_s = stop_s if spent_s < duration_s else self._time_s + duration_s
        return spent_s

    def _steps_to_next_event(self, interval: IntervalDecision) -> int:
        """Steps until a save is due or the one in flight is durable: none decides in between."""
        assert interval.interval_steps is not None
        steps = self._last_saved_step + interval.interval_steps - self._step
        if self._in_flight is not None:
            left_s = self._in_flight[1] - self._time_s
            until_durable = math.ceil(left_s / self._job.step_s)
            # One that is due earlier than that is postponed at every step in between.
            steps = until_durable if steps < 1 else min(steps, until_durable)
        return max(1, steps)

    def _moment(self) -> Moment:
        return Moment(
            time_s=self._time_s,
            elapsed_s=self._time_s - self._began_s,
            step_s=self._job.step_s,
        )

    def _train(self, num_steps: int, stop_s: float) -> None:
        if self._time_s >= stop_s:
            return
        spent_s = self._spend(num_steps * self._job.step_s, stop_s)
        done = num_steps if self._time_s < stop_s else int(spent_s / self._job.step_s)
        self._step += done
        self._partial_s = max(0.0, spent_s - done * self._job.step_s)

    def _collect(self) -> None:
        """Take in the save in flight if it is durable by now."""
        if self._in_flight is None or self._in_flight[1] > self._time_s:
            return
        self._durable_step, _, cost_s = self._in_flight
        self._in_flight = None
        measured = SaveMeasurement(cost_s=cost_s, persist_s=self._job.persist_s)
        self._chooser.save_committed(measured)

    def _save_if_due(self, interval: IntervalDecision, stop_s: float) -> None:
        decision = decide_save(
            SaveObservation(
                step=self._step,
                last_saved_step=self._last_saved_step,
                interval=interval,
                save_in_flight=self._in_flight is not None,
            )
        )
        if not decision.save:
            return
        self._intervals.append((self._time_s, self._step - self._last_saved_step))
        cost_s = self._job.cost_s.at(self._time_s)
        self._chooser.save_started()
        self._saving_s += self._spend(cost_s, stop_s)
        self._last_saved_step = self._step
        if self._time_s < stop_s:
            self._in_flight = (self._step, self._time_s + self._job.persist_s, cost_s)

    def _fail(self, failure: Failure) -> None:
        """Go back to the last durable step; what was in flight is gone."""
        self._collect()
        self._lost_s += (self._step - self._durable_step) * self._job.step_s + self._partial_s
        self._step = self._last_saved_step = self._durable_step
        self._partial_s = 0.0
        self._in_flight = None
        self._num_failures += 1
        self._chooser.attempt_failed(self._time_s - self._began_s, failure.group)
