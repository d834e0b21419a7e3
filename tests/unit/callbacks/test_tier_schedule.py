"""The interval follows what steps and saves take now, whatever they took before."""

from __future__ import annotations

from hetero_fw.callbacks import TierSchedule, read_facts
from hetero_fw.checkpoint import SaveOutcome
from hetero_fw.policies import IntervalRule, Tier, daly_interval_s
from tests.unit.planning.examples import plan

MTBF_S = 10_800.0
# What has to be followed within: steps, and saves.
STEP_WINDOW = 50
SAVE_WINDOW = 9


class Training:
    """Steps and saves that take what a test says."""

    def __init__(self) -> None:
        rule = IntervalRule(interval_steps=10**6, first_save_step=2, prior_mtbf_s=MTBF_S)
        self.schedule = TierSchedule(
            Tier.STORAGE,
            rule,
            read_facts([], plan(), rule.prior_mtbf_s),
            first_step=0,
            max_steps=10**9,
        )
        self.saved_steps: list[int] = []
        self._step = 0

    def step(self, *, step_s: float, cost_s: float, persist_s: float = 0.1) -> None:
        self._step += 1
        self.schedule.step_ended(step_s, is_disturbed=False)
        if not self.schedule.decide(self._step, 0.0, save_in_flight=False).save:
            return
        self.saved_steps.append(self._step)
        self.schedule.save_began(self._step)
        self.schedule.save_ended(
            SaveOutcome(
                step=self._step, ok=True, reason="test", stall_s=cost_s, persist_s=persist_s
            )
        )

    def steps(self, count: int, *, step_s: float, cost_s: float) -> None:
        for _ in range(count):
            self.step(step_s=step_s, cost_s=cost_s)

    def saves(self, count: int, *, step_s: float, cost_s: float, persist_s: float = 0.1) -> None:
        enough = len(self.saved_steps) + count
        while len(self.saved_steps) < enough:
            self.step(step_s=step_s, cost_s=cost_s, persist_s=persist_s)

    def next_interval(self, *, step_s: float, cost_s: float) -> int:
        """Steps between the next two saves."""
        self.saves(2, step_s=step_s, cost_s=cost_s)
        return self.saved_steps[-1] - self.saved_steps[-2]


def optimum(*, step_s: float, cost_s: float) -> int:
    return round(daly_interval_s(cost_s, MTBF_S) / step_s)


def test_steps_that_become_slower_are_followed_within_their_window() -> None:
    training = Training()
    training.steps(3000, step_s=1.0, cost_s=0.5)
    assert training.next_interval(step_s=1.0, cost_s=0.5) == optimum(step_s=1.0, cost_s=0.5) == 104
    training.steps(STEP_WINDOW, step_s=4.0, cost_s=0.5)
    assert training.schedule.step_time_s == 4.0
    assert training.next_interval(step_s=4.0, cost_s=0.5) == optimum(step_s=4.0, cost_s=0.5) == 26
    training.steps(STEP_WINDOW, step_s=1.0, cost_s=0.5)
    assert training.next_interval(step_s=1.0, cost_s=0.5) == 104


def test_saves_that_become_dearer_are_followed_within_their_window() -> None:
    training = Training()
    training.saves(60, step_s=1.0, cost_s=0.5)
    assert training.next_interval(step_s=1.0, cost_s=0.5) == 104
    training.saves(SAVE_WINDOW, step_s=1.0, cost_s=8.0)
    assert training.next_interval(step_s=1.0, cost_s=8.0) == optimum(step_s=1.0, cost_s=8.0) == 410


def test_writing_that_becomes_slower_is_followed_within_its_window() -> None:
    training = Training()
    training.saves(60, step_s=1.0, cost_s=0.5, persist_s=2.0)
    assert training.schedule.persist_time_s == 2.0
    training.saves(SAVE_WINDOW, step_s=1.0, cost_s=0.5, persist_s=300.0)
    assert training.schedule.persist_time_s == 300.0
    assert training.next_interval(step_s=1.0, cost_s=0.5) == 300


def test_one_slow_step_or_save_changes_nothing() -> None:
    training = Training()
    training.saves(20, step_s=1.0, cost_s=0.5)
    training.steps(1, step_s=50.0, cost_s=0.5)
    assert training.next_interval(step_s=1.0, cost_s=0.5) == 104
    training.saves(1, step_s=1.0, cost_s=90.0)
    assert training.next_interval(step_s=1.0, cost_s=0.5) == 104
