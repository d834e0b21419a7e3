"""Ways for a cluster to fail, and how much each chooser of intervals wastes under them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from hetero_fw.hardware import DeviceKind
from hetero_fw.policies import DeviceGroup, IntervalPolicy, IntervalRule
from hetero_fw.simulate import (
    Chooser,
    Failure,
    NodeTrace,
    OracleChooser,
    PolicyChooser,
    SimulatedJob,
    SimulatedRun,
    StepFunction,
    draw_failures,
    parse_node_trace,
    simulate_run,
)

TRACES = Path(__file__).resolve().parents[2] / "data" / "bamboo"
TRACE_RESOLUTION_S = 60.0
FIXED_INTERVALS = (10, 100, 500, 1000)
A100 = DeviceGroup(name="a100", kind=DeviceKind.CUDA, num_devices=16)
SPOT = DeviceGroup(name="spot", kind=DeviceKind.CUDA, num_devices=48)


@dataclass(frozen=True, kw_only=True)
class Regime:
    """A job and the failures it meets, drawn anew for each seed.

    `mtbf_s` is what the oracle is told.
    """

    name: str
    job: SimulatedJob
    mtbf_s: StepFunction
    end_s: float
    draw: Callable[[int], Sequence[Failure]]
    groups: tuple[DeviceGroup, ...] = (A100,)

    def runs(self, make: Callable[[], Chooser], num_seeds: int) -> list[SimulatedRun]:
        seeds = range(num_seeds)
        return [simulate_run(self.job, self.draw(s), make(), self.end_s) for s in seeds]

    @cached_property
    def oracle(self) -> Callable[[], Chooser]:
        return lambda: OracleChooser(self.job.cost_s, self.mtbf_s, self.job.persist_s)

    @cached_property
    def policy(self) -> Callable[[], PolicyChooser]:
        """As configured by default, with a prior that knows nothing of the regime."""
        return lambda: PolicyChooser(IntervalRule(), self.groups)

    def fixed(self, interval_steps: int) -> Callable[[], Chooser]:
        rule = IntervalRule(policy=IntervalPolicy.FIXED, interval_steps=interval_steps)
        return lambda: PolicyChooser(rule, self.groups)


def mean_waste_s(runs: Sequence[SimulatedRun]) -> float:
    """Seconds that a run spends on saves and loses to failures; restarts cost everybody alike."""
    return statistics.fmean(run.waste_s for run in runs)


def job(cost_s: float | StepFunction, restart_s: float = 30.0) -> SimulatedJob:
    """Steps of a second; what is not stall of a save takes three times as long."""
    cost = cost_s if isinstance(cost_s, StepFunction) else StepFunction.constant(cost_s)
    return SimulatedJob(
        step_s=1.0, cost_s=cost, persist_s=3.0 * max(cost.values), restart_s=restart_s
    )


def constant(mtbf_s: float, cost_s: float, num_failures: float = 50.0) -> Regime:
    return stepped((mtbf_s,), cost_s, num_failures * mtbf_s)


def stepped(mtbfs_s: tuple[float, ...], cost_s: float, end_s: float) -> Regime:
    """Each of `mtbfs_s` for an equal part of the time."""
    part_s = end_s / len(mtbfs_s)
    mtbf = StepFunction(
        starts_s=tuple(part_s * index for index in range(len(mtbfs_s))), values=mtbfs_s
    )
    values = " -> ".join(f"{value:.0f}" for value in mtbfs_s)
    return Regime(
        name=f"M {values} s, C {cost_s} s",
        job=job(cost_s),
        mtbf_s=mtbf,
        end_s=end_s,
        draw=lambda seed: draw_failures(mtbf, end_s, seed, "a100"),
    )


def two_groups(a100_s: float, spot_s: float, cost_s: float) -> Regime:
    both_s = 1.0 / (1.0 / a100_s + 1.0 / spot_s)
    end_s = 50.0 * both_s
    means_s = {"a100": StepFunction.constant(a100_s), "spot": StepFunction.constant(spot_s)}

    def draw(seed: int) -> list[Failure]:
        drawn = (
            draw_failures(mean_s, end_s, 2 * seed + index, group)
            for index, (group, mean_s) in enumerate(means_s.items())
        )
        return sorted((failure for each in drawn for failure in each), key=lambda f: f.time_s)

    return Regime(
        name=f"M {a100_s:.0f} s + {spot_s:.0f} s, C {cost_s} s",
        job=job(cost_s),
        mtbf_s=StepFunction.constant(both_s),
        end_s=end_s,
        draw=draw,
        groups=(A100, SPOT),
    )


def drifting_cost(mtbf_s: float, costs_s: tuple[float, float]) -> Regime:
    """The cost steps in the middle of the run."""
    end_s = 50.0 * mtbf_s
    cost = StepFunction(starts_s=(0.0, end_s / 2), values=costs_s)
    regime = constant(mtbf_s, costs_s[0])
    return Regime(
        name=f"M {mtbf_s:.0f} s, C {costs_s[0]} -> {costs_s[1]} s",
        job=job(cost),
        mtbf_s=regime.mtbf_s,
        end_s=end_s,
        draw=regime.draw,
    )


def load_trace(name: str) -> NodeTrace:
    return parse_node_trace((TRACES / f"{name}.csv").read_text().splitlines())


def traced(name: str, cost_s: float) -> Regime:
    """A real trace, begun at a random place and wrapped around.

    It tells the minute of each failure; the second is drawn. Without that, intervals that divide a
    minute would lose next to nothing or next to everything.
    """
    trace = load_trace(name)

    def draw(seed: int) -> list[Failure]:
        generator = np.random.default_rng(seed)
        begin_s = generator.uniform(0.0, trace.end_s)
        times_s = [
            (failure.time_s + generator.uniform(0.0, TRACE_RESOLUTION_S) - begin_s) % trace.end_s
            for failure in trace.failures()
        ]
        return [Failure(time_s=time_s, group="a100") for time_s in sorted(times_s)]

    return Regime(
        name=f"{name}, mean M {trace.mtbf_s():.0f} s, C {cost_s} s",
        job=job(cost_s),
        mtbf_s=StepFunction.constant(trace.mtbf_s()),
        end_s=trace.end_s,
        draw=draw,
    )
