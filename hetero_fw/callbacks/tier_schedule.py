"""When one tier of storage is saved to next, by what its saves have cost."""

from __future__ import annotations

import statistics
from collections.abc import Collection

from hetero_fw.callbacks.run_history import RunHistoryFacts
from hetero_fw.callbacks.save_cost import SaveCostMeter
from hetero_fw.checkpoint import SaveOutcome
from hetero_fw.policies import (
    IntervalObservation,
    IntervalRule,
    SaveDecision,
    SaveObservation,
    Tier,
    decide_interval,
    decide_save,
)


class TierSchedule:
    """Told of every step and every save of one rank; asked on rank 0 whether to save.

    Args:
        tier: whose schedule it is.
        rule: how its interval is chosen.
        history: what earlier attempts have shown.
        first_step: the step training starts from.
        max_steps: the step it ends with.
    """

    def __init__(
        self,
        tier: Tier,
        rule: IntervalRule,
        history: RunHistoryFacts,
        *,
        first_step: int,
        max_steps: int,
    ) -> None:
        self.tier = tier
        # Of the save that was started last; whether it was committed is known later, and not on
        # all ranks at the same step.
        self.last_saved_step = first_step
        self._rule = rule
        self._rates = history.rates
        self._meter = SaveCostMeter(history.saves[tier])
        self._max_steps = max_steps
        self._num_saves = 0
        self.num_postponed = 0  # steps in a row for which the save that is due has had to wait
        self._num_failed = 0
        self._committed_step = first_step

    @property
    def step_time_s(self) -> float | None:
        """Usual time of a step that nothing disturbs; None before it is known."""
        return statistics.median(self._meter.step_times_s) if self._meter.step_times_s else None

    @property
    def persist_time_s(self) -> float | None:
        """Usual time from the end of staging until a save is published; None likewise."""
        times_s = self._meter.persist_times_s
        return statistics.median(times_s) if times_s else None

    def decide(self, step: int, elapsed_s: float, *, save_in_flight: bool) -> SaveDecision:
        """Whether to save after `step`.

        Args:
            step: the step that is about to end.
            elapsed_s: since this attempt began to train.
            save_in_flight: to this tier, on any rank.
        """
        observed = IntervalObservation(
            mtbf=self._rates.estimate(elapsed_s),
            step_times_s=self._meter.step_times_s,
            save_costs_s=self._meter.save_costs_s,
            persist_times_s=self._meter.persist_times_s,
            num_saves_started=self._num_saves,
        )
        decision = decide_save(
            SaveObservation(
                step=step,
                last_saved_step=(
                    self._committed_step if self._num_failed else self.last_saved_step
                ),
                interval=decide_interval(self._rule, observed),
                is_final=step >= self._max_steps,
                save_in_flight=save_in_flight and step < self._max_steps,
                num_postponed=self.num_postponed,
                num_failed=self._num_failed,
                last_failed_step=self.last_saved_step,
            )
        )
        self.num_postponed = self.num_postponed + 1 if decision.is_postponed else 0
        return decision

    def step_ended(self, taken_s: float, *, is_disturbed: bool) -> None:
        """As `SaveCostMeter.step_ended`."""
        self._meter.step_ended(taken_s, is_disturbed=is_disturbed)

    def save_began(self, step: int) -> None:
        """A save of `step` to this tier was started."""
        self._meter.save_began()
        self.last_saved_step = step
        self._num_saves += 1

    def save_ended(self, outcome: SaveOutcome) -> None:
        """The save that was started last has ended."""
        self._meter.save_ended(outcome.stall_s, outcome.persist_s, is_committed=outcome.ok)
        self._num_failed = 0 if outcome.ok else self._num_failed + 1
        if outcome.ok:
            self._committed_step = outcome.step


def to_number(tiers: Collection[Tier]) -> float:
    """A set of tiers as a number, for the report of a step."""
    return float(sum(1 << place for place, tier in enumerate(Tier) if tier in tiers))


def from_number(number: float) -> frozenset[Tier]:
    """Inverse of `to_number`."""
    return frozenset(tier for place, tier in enumerate(Tier) if int(number) >> place & 1)
