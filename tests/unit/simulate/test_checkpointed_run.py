from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_fw.hardware import DeviceKind
from hetero_fw.policies import DeviceGroup, IntervalPolicy, IntervalRule
from hetero_fw.simulate import (
    Failure,
    PolicyChooser,
    SimulatedJob,
    SimulatedRun,
    StepFunction,
    simulate_run,
)

relaxed = settings(max_examples=50, deadline=None)
GROUPS = (DeviceGroup(name="a100", kind=DeviceKind.CUDA, num_devices=4),)


def simulate(
    *failures_s: float,
    interval_steps: int = 10,
    cost_s: float = 1.0,
    persist_s: float = 2.0,
    restart_s: float = 5.0,
    end_s: float = 100.0,
) -> SimulatedRun:
    """Steps of one second, saved every `interval_steps`."""
    rule = IntervalRule(policy=IntervalPolicy.FIXED, interval_steps=interval_steps)
    job = SimulatedJob(
        step_s=1.0,
        cost_s=StepFunction.constant(cost_s),
        persist_s=persist_s,
        restart_s=restart_s,
    )
    failures = [Failure(time_s=time_s, group="a100") for time_s in failures_s]
    return simulate_run(job, failures, PolicyChooser(rule, GROUPS), end_s)


def test_without_failures_saves_are_all_that_is_lost() -> None:
    run = simulate()
    assert run.saving_s == 9.0  # at 10, 21, ..., 98
    assert run.useful_s == 91.0
    assert run.lost_s == run.restart_s == run.num_failures == 0


def test_a_failure_loses_what_was_not_durable() -> None:
    # saved at 10, durable at 13, saved again at 21; 3.5 s of step 23 and 24 are lost with 20.
    run = simulate(18.5, end_s=30.0)
    assert run.lost_s == 7.5
    assert run.restart_s == 5.0
    assert run.useful_s == 16.5
    assert run.num_failures == 1


def test_a_save_in_flight_is_lost_with_the_job() -> None:
    run = simulate(12.5, end_s=20.0)
    assert run.saving_s == 1.0
    assert run.lost_s == 11.5
    assert run.useful_s == 2.5


def test_a_save_is_lost_when_its_stall_is_cut_short() -> None:
    run = simulate(10.5, end_s=20.0)
    assert run.saving_s == 0.5
    assert run.lost_s == 10.0


def test_a_failure_during_a_restart_costs_the_restart_again() -> None:
    run = simulate(13.0, 15.0, end_s=30.0)
    assert run.restart_s == 7.0
    assert run.num_failures == 2
    assert run.lost_s == 2.0


def test_a_save_waits_for_the_one_in_flight() -> None:
    run = simulate(interval_steps=1, cost_s=0.0, persist_s=7.5, end_s=50.0)
    assert [time_s for time_s, _ in run.intervals] == [1.0, 9.0, 17.0, 25.0, 33.0, 41.0, 49.0]


def test_what_fails_at_or_after_the_end_is_not_seen() -> None:
    assert simulate(100.0, 101.0).num_failures == 0


@relaxed
@given(
    st.lists(st.floats(0.1, 999.0), max_size=20),
    st.integers(1, 200),
    st.floats(0.0, 20.0),
    st.floats(0.0, 50.0),
    st.floats(0.0, 50.0),
)
def test_every_second_is_accounted_for(
    failures_s: list[float],
    interval_steps: int,
    cost_s: float,
    persist_s: float,
    restart_s: float,
) -> None:
    run = simulate(
        *sorted(failures_s),
        interval_steps=interval_steps,
        cost_s=cost_s,
        persist_s=persist_s,
        restart_s=restart_s,
        end_s=1000.0,
    )
    parts_s = (run.useful_s, run.saving_s, run.lost_s, run.restart_s)
    assert min(parts_s) >= 0.0
    assert sum(parts_s) == pytest.approx(1000.0)
    assert run.num_failures == len(set(failures_s))
