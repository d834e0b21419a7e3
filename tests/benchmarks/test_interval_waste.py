"""What the interval of the real policy wastes, beside an oracle and fixed intervals, simulated.

Waste is the time that saves cost and failures undo, restarts left out: they cost everybody alike.
The oracle is told the cost and the failure rate of every moment; the policy starts from its default
prior of 3 hours and measures both. "best" is the best of many fixed intervals, known afterwards.
"""

from __future__ import annotations

import math
import statistics

import pytest

from hetero_fw.simulate import SimulatedRun
from tests.benchmarks.figures import show
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

DAY_S = 86400.0
NUM_SEEDS = 30
NUM_SEEDS_FIXED = 2
# A fixed interval that comes this near to the policy is judged by as many seeds as the policy.
NEAR = 0.15
CANDIDATES = (20, 35, 60, 150, 220, 330, 750, 1600)

REGIMES = [
    *(constant(2700.0, cost_s) for cost_s in (0.2, 1.0, 5.0, 30.0)),
    *(constant(28_440.0, cost_s) for cost_s in (5.0, 30.0)),
    constant(10_800.0, 2.0),
    constant(675.0, 1.0),
    constant(2700.0, 5.0, num_failures=4.0),
    two_groups(10_800.0, 2700.0, 5.0),
    drifting_cost(2700.0, (4.0, 16.0)),
    *(stepped((10_800.0, 2700.0), 5.0, days * DAY_S) for days in (1, 2.5, 7)),
    *(stepped((2700.0, 10_800.0), 5.0, days * DAY_S) for days in (1, 2.5, 7)),
    stepped((2700.0, 675.0), 1.0, 2 * DAY_S),
    *(traced(name, cost_s) for name in ("g4dn", "p3") for cost_s in (1.0, 5.0, 30.0)),
]


def ratio(runs: list[SimulatedRun], oracle: list[SimulatedRun]) -> tuple[float, float]:
    """How many times the oracle's waste, and the standard error of that."""
    base_s = mean_waste_s(oracle)
    more = [(a.waste_s - b.waste_s) / base_s for a, b in zip(runs, oracle, strict=True)]
    return 1.0 + statistics.fmean(more), statistics.stdev(more) / math.sqrt(len(more))


def fixed_ratio(
    regime: Regime, steps: int, oracle: list[SimulatedRun], policy_ratio: float
) -> float:
    few = oracle[:NUM_SEEDS_FIXED]
    quick, _ = ratio(regime.runs(regime.fixed(steps), NUM_SEEDS_FIXED), few)
    if abs(quick - policy_ratio) > NEAR:
        return quick
    return ratio(regime.runs(regime.fixed(steps), NUM_SEEDS), oracle)[0]


def row(regime: Regime) -> str:
    oracle = regime.runs(regime.oracle, NUM_SEEDS)
    mean, error = ratio(regime.runs(regime.policy, NUM_SEEDS), oracle)
    fixed = {
        steps: fixed_ratio(regime, steps, oracle, mean) for steps in (*FIXED_INTERVALS, *CANDIDATES)
    }
    best = min(fixed, key=lambda steps: fixed[steps])
    num_failures = statistics.fmean(run.num_failures for run in oracle)
    return (
        f"{regime.name:36} {num_failures:5.0f} {100 * mean_waste_s(oracle) / regime.end_s:7.2f} %"
        f"  {mean:.3f} +- {error:.3f} "
        + "".join(f"{fixed[steps]:8.2f}" for steps in FIXED_INTERVALS)
        + f"  {fixed[best]:.2f} at {best}"
    )


@pytest.mark.benchmark
@pytest.mark.timeout(900)
def test_interval_waste() -> None:
    heads = "".join(f"{steps:8}" for steps in FIXED_INTERVALS)
    show(
        f"{'':36} fails   oracle  policy, by oracle  fixed interval in steps of 1 s, by oracle",
        f"{'':36} {'':24}           {heads}  best",
        *(row(regime) for regime in REGIMES),
    )
