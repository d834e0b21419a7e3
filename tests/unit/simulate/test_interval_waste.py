"""The interval of the real policy, under failures, beside an oracle and beside fixed intervals."""

from __future__ import annotations

import statistics

import pytest

from hetero_fw.policies import young_interval_s
from tests.unit.simulate.regimes import (
    FIXED_INTERVALS,
    Regime,
    constant,
    drifting_cost,
    mean_waste_s,
    stepped,
    traced,
    two_groups,
)

WEEK_S = 7 * 86400.0
# Each with as many seeds as it takes to know the ratio within 1 %. A rate that steps
# by 4 does so once a week: nobody can tell within 5 % from the few failures of a day.
REGIMES = [
    (constant(2700.0, 5.0), 40),
    (constant(7200.0, 4.0), 25),
    (two_groups(10800.0, 2700.0, 5.0), 40),
    (stepped((10800.0, 2700.0), 10.0, WEEK_S), 25),
    (stepped((2700.0, 10800.0), 10.0, WEEK_S), 25),
    (drifting_cost(2700.0, (4.0, 16.0)), 40),
    (traced("g4dn", 2.0), 100),
    (traced("p3", 2.0), 60),
]


@pytest.mark.parametrize(
    ("regime", "num_seeds"), [pytest.param(*row, id=row[0].name) for row in REGIMES]
)
def test_waste_is_close_to_the_oracles_and_below_every_fixed_intervals(
    regime: Regime, num_seeds: int
) -> None:
    policy = regime.runs(regime.policy, num_seeds)
    oracle = regime.runs(regime.oracle, num_seeds)
    assert mean_waste_s(policy) <= 1.05 * mean_waste_s(oracle)
    for interval_steps in FIXED_INTERVALS:
        # Saving every 10 steps is as far off as it takes long to simulate.
        num_fixed = 1 if interval_steps == 10 else 8
        fixed = regime.runs(regime.fixed(interval_steps), num_fixed)
        assert mean_waste_s(policy[:num_fixed]) < mean_waste_s(fixed)


def test_interval_follows_a_step_of_the_rate() -> None:
    regime = stepped((10800.0, 2700.0, 10800.0), 5.0, 324_000.0)
    runs = regime.runs(regime.policy, 20)
    for start_s, end_s, mtbf_s in regime.mtbf_s.pieces(regime.end_s):
        settled_s = (start_s + end_s) / 2
        intervals = [
            steps for run in runs for time_s, steps in run.intervals if settled_s < time_s < end_s
        ]
        optimum_s = young_interval_s(5.0, mtbf_s)
        assert statistics.median(intervals) == pytest.approx(optimum_s, rel=0.2)


def test_interval_is_never_shorter_than_writing_takes() -> None:
    regime = constant(60.0, 5.0)
    measured = [run.intervals[2:] for run in regime.runs(regime.policy, 5)]
    steps = [steps for run in measured for _, steps in run]
    assert min(steps) >= regime.job.persist_s / regime.job.step_s
