"""Who chooses the interval in a simulation: the policy of real runs, an oracle, or nobody."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from hetero_fw.policies import (
    AttemptRecord,
    DeviceGroup,
    IntervalDecision,
    IntervalObservation,
    IntervalRule,
    daly_interval_s,
    decide_interval,
    learn_failure_rates,
)
from hetero_fw.simulate.failures import StepFunction

_KEPT_COSTS = 50


@dataclass(frozen=True, kw_only=True)
class SaveMeasurement:
    """What a committed save has shown."""

    cost_s: float
    persist_s: float


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A step boundary.

    Attributes:
        time_s: simulated time; `elapsed_s` since the attempt began.
        step_s: what a step takes.
    """

    time_s: float
    elapsed_s: float
    step_s: float


class Chooser(Protocol):
    """Chooses intervals. Its `interval` may be called at any step boundary, the others tell it."""

    def interval(self, now: Moment) -> IntervalDecision:
        """Steps between two saves, as of now."""

    def save_started(self) -> None:
        """A save has started."""

    def save_committed(self, measured: SaveMeasurement) -> None:
        """The save in flight is on storage."""

    def attempt_failed(self, duration_s: float, group: str | None) -> None:
        """The attempt has failed after `duration_s`, in `group` if known; the next one begins."""


class PolicyChooser:
    """Runs the policy of real runs on what a real run would know.

    Args:
        rule: as configured.
        groups: of the simulated cluster.
    """

    def __init__(self, rule: IntervalRule, groups: tuple[DeviceGroup, ...]) -> None:
        self._rule = rule
        self._groups = groups
        self._attempts: list[AttemptRecord] = []
        self._costs_s: deque[float] = deque(maxlen=_KEPT_COSTS)
        self._persists_s: deque[float] = deque(maxlen=_KEPT_COSTS)
        self._num_saves = 0
        self._rates = learn_failure_rates(groups, rule.prior_mtbf_s, ())

    def interval(self, now: Moment) -> IntervalDecision:
        """Ask the policy."""
        observed = IntervalObservation(
            mtbf=self._rates.estimate(now.elapsed_s),
            step_times_s=(now.step_s,),
            save_costs_s=tuple(self._costs_s),
            persist_times_s=tuple(self._persists_s),
            num_saves_started=self._num_saves,
        )
        return decide_interval(self._rule, observed)

    def save_started(self) -> None:
        """Count it."""
        self._num_saves += 1

    def save_committed(self, measured: SaveMeasurement) -> None:
        """Remember what it cost."""
        self._costs_s.append(measured.cost_s)
        self._persists_s.append(measured.persist_s)

    def attempt_failed(self, duration_s: float, group: str | None) -> None:
        """Learn from the whole log again, as every attempt of a real run does."""
        record = AttemptRecord(
            duration_s=duration_s,
            num_devices={each.name: each.num_devices for each in self._groups},
            has_failed=True,
            failed_group=group,
        )
        self._attempts.append(record)
        self._num_saves = 0
        self._rates = learn_failure_rates(self._groups, self._rule.prior_mtbf_s, self._attempts)


class OracleChooser:
    """Knows what saves cost and how often the cluster fails, now and before anything was seen."""

    def __init__(self, cost_s: StepFunction, mtbf_s: StepFunction, persist_s: float) -> None:
        self._cost_s = cost_s
        self._mtbf_s = mtbf_s
        self._persist_s = persist_s

    def interval(self, now: Moment) -> IntervalDecision:
        """The optimum for the true values."""
        optimum_s = daly_interval_s(self._cost_s.at(now.time_s), self._mtbf_s.at(now.time_s))
        steps = max(1, round(max(optimum_s, self._persist_s) / now.step_s))
        return IntervalDecision(interval_steps=steps, reason="oracle")

    def save_started(self) -> None:
        """It needs no telling."""

    def save_committed(self, measured: SaveMeasurement) -> None:
        """It needs no telling."""

    def attempt_failed(self, duration_s: float, group: str | None) -> None:
        """It needs no telling."""
