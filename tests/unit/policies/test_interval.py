from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_fw.errors import ConfigError
from hetero_fw.policies import (
    IntervalObservation,
    IntervalPolicy,
    IntervalRule,
    decide_interval,
    estimate_mtbf_s,
    young_interval_s,
)

relaxed = settings(max_examples=50, deadline=None)
seconds = st.floats(min_value=1e-3, max_value=1e5)
counts = st.integers(min_value=0, max_value=50)


def interval_steps(rule: IntervalRule, observed: IntervalObservation) -> int:
    steps = decide_interval(rule, observed).interval_steps
    assert steps is not None
    return steps


def measured(
    cost_s: float,
    *,
    step_s: float = 0.1,
    failures: int = 1,
    exposure_s: float = 0.0,
    persist_s: float = 0.0,
) -> IntervalObservation:
    return IntervalObservation(
        step_times_s=[step_s],
        save_costs_s=[cost_s],
        persist_times_s=[persist_s],
        num_saves_started=1,
        num_failures=failures,
        exposure_s=exposure_s,
    )


def test_youngs_formula() -> None:
    assert young_interval_s(0.2, 2700.0) == pytest.approx(math.sqrt(1080.0))


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(-1.0, 10.0), (1.0, 0.0), (1.0, -5.0)])
def test_youngs_formula_rejects_what_it_has_no_meaning_for(cost_s: float, mtbf_s: float) -> None:
    with pytest.raises(ValueError, match="cost_s"):
        young_interval_s(cost_s, mtbf_s)


def test_mtbf_is_the_prior_before_anything_was_seen() -> None:
    assert estimate_mtbf_s(0, 0.0, 10800.0) == 10800.0


def test_mtbf_follows_the_data_when_there_is_much_of_it() -> None:
    assert estimate_mtbf_s(1000, 60_000.0, 10800.0) == pytest.approx(60.0, rel=0.2)


@relaxed
@given(counts, seconds, seconds, st.floats(min_value=0.1, max_value=10.0))
def test_mtbf_is_monotone(
    failures: int, exposure_s: float, prior_s: float, strength: float
) -> None:
    base = estimate_mtbf_s(failures, exposure_s, prior_s, strength)
    assert estimate_mtbf_s(failures + 1, exposure_s, prior_s, strength) < base
    assert estimate_mtbf_s(failures, exposure_s + 1.0, prior_s, strength) > base
    assert estimate_mtbf_s(failures, exposure_s, prior_s * 2, strength) > base


def test_fixed_and_none() -> None:
    observed = measured(1.0)
    fixed = IntervalRule(policy=IntervalPolicy.FIXED, interval_steps=7)
    assert interval_steps(fixed, observed) == 7
    none = decide_interval(IntervalRule(policy=IntervalPolicy.NONE), observed)
    assert none.interval_steps is None
    assert "ckpt.policy=none" in none.reason


def test_first_save_measures_then_the_prior_holds_until_a_cost_is_known() -> None:
    rule = IntervalRule(interval_steps=500, first_save_step=10)
    assert interval_steps(rule, IntervalObservation()) == 10
    assert interval_steps(rule, IntervalObservation(num_saves_started=1)) == 500


def test_first_save_is_never_later_than_the_interval() -> None:
    rule = IntervalRule(interval_steps=4, first_save_step=10)
    assert interval_steps(rule, IntervalObservation()) == 4


def test_the_optimum_in_steps_with_its_numbers() -> None:
    rule = IntervalRule(prior_mtbf_s=5400.0)
    observed = measured(0.2, step_s=0.5, failures=1)  # M = 5400 / 2 s, T = sqrt(1080) = 32.86 s
    decision = decide_interval(rule, observed)
    assert decision.interval_steps == 65
    assert "sqrt(2 x 0.2 s x 2700 s) = 32.86 s, 65 steps of 0.5 s" in decision.reason
    assert "1 failures" in decision.reason


def test_one_slow_save_does_not_move_the_interval() -> None:
    rule = IntervalRule()
    usual = IntervalObservation(step_times_s=[0.1], save_costs_s=[0.1] * 3, num_failures=1)
    with_outlier = IntervalObservation(
        step_times_s=[0.1, 0.1, 9.0], save_costs_s=[0.1, 30.0, 0.1], num_failures=1
    )
    assert interval_steps(rule, usual) == interval_steps(rule, with_outlier)


def test_old_costs_are_forgotten() -> None:
    rule = IntervalRule()
    drifted = IntervalObservation(
        step_times_s=[0.1], save_costs_s=[9.0] * 20 + [0.1] * 9, num_failures=1
    )
    assert interval_steps(rule, drifted) == interval_steps(rule, measured(0.1))


def test_not_longer_than_the_prior_until_a_failure_was_seen() -> None:
    rule = IntervalRule(interval_steps=100)
    quiet = decide_interval(rule, measured(10.0, failures=0))
    assert quiet.interval_steps == 100
    assert "until a failure was seen" in quiet.reason
    assert interval_steps(rule, measured(10.0, failures=1)) > 100


def test_not_shorter_than_the_time_to_write_one() -> None:
    decision = decide_interval(IntervalRule(), measured(1e-6, step_s=0.1, persist_s=2.0))
    assert decision.interval_steps == 20
    assert "writing one takes 2 s" in decision.reason


def test_a_free_save_is_made_every_step() -> None:
    assert interval_steps(IntervalRule(), measured(0.0)) == 1


@relaxed
@given(seconds, seconds, counts, seconds, seconds)
def test_interval_is_monotone(
    cost_s: float, step_s: float, failures: int, exposure_s: float, persist_s: float
) -> None:
    rule = IntervalRule()

    def steps(cost: float, num_failures: int, exposure: float, persist: float) -> int:
        observed = measured(
            cost, step_s=step_s, failures=num_failures, exposure_s=exposure, persist_s=persist
        )
        return interval_steps(rule, observed)

    base = steps(cost_s, failures, exposure_s, persist_s)
    assert base >= 1
    assert base >= persist_s / step_s
    assert steps(cost_s * 2, failures, exposure_s, persist_s) >= base
    assert steps(cost_s, failures, exposure_s, persist_s * 2) >= base
    assert steps(cost_s, failures, exposure_s * 2, persist_s) >= base
    if failures > 0:
        assert steps(cost_s, failures + 1, exposure_s, persist_s) <= base


def test_every_bad_value_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        IntervalRule(interval_steps=0, first_save_step=0, prior_mtbf_s=0.0)
    assert len(caught.value.problems) == 3
    for key in ("ckpt.interval_steps=0", "ckpt.first_save_step=0", "ckpt.prior_mtbf_s=0.0"):
        assert key in str(caught.value)
