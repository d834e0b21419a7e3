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
    MtbfEstimate,
    daly_interval_s,
    decide_interval,
    young_interval_s,
)

relaxed = settings(max_examples=50, deadline=None)
seconds = st.floats(min_value=1e-3, max_value=1e5)


def interval_steps(rule: IntervalRule, observed: IntervalObservation) -> int:
    steps = decide_interval(rule, observed).interval_steps
    assert steps is not None
    return steps


def mtbf(mtbf_s: float = 10800.0, failures: int = 1) -> MtbfEstimate:
    return MtbfEstimate(mtbf_s=mtbf_s, num_failures=failures, reason=f"MTBF {mtbf_s:.4g} s")


def unmeasured(num_saves_started: int = 0) -> IntervalObservation:
    return IntervalObservation(mtbf=mtbf(failures=0), num_saves_started=num_saves_started)


def measured(
    cost_s: float,
    *,
    step_s: float = 0.1,
    mtbf_s: float = 10800.0,
    failures: int = 1,
    persist_s: float = 0.0,
) -> IntervalObservation:
    return IntervalObservation(
        mtbf=mtbf(mtbf_s, failures),
        step_times_s=[step_s],
        save_costs_s=[cost_s],
        persist_times_s=[persist_s],
        num_saves_started=1,
    )


def test_youngs_formula() -> None:
    assert young_interval_s(0.2, 2700.0) == pytest.approx(math.sqrt(1080.0))


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(-1.0, 10.0), (1.0, 0.0), (1.0, -5.0)])
def test_youngs_formula_rejects_what_it_has_no_meaning_for(cost_s: float, mtbf_s: float) -> None:
    with pytest.raises(ValueError, match="cost_s"):
        young_interval_s(cost_s, mtbf_s)


def daly_waste(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Expected time for one second of work, by Daly's complete model, without its constants."""
    return mtbf_s * math.expm1((interval_s + cost_s) / mtbf_s) / interval_s


@relaxed
@given(seconds, st.floats(min_value=1e-6, max_value=1.99))
def test_dalys_interval_is_the_optimum_of_his_model(mtbf_s: float, ratio: float) -> None:
    cost_s = ratio * mtbf_s
    ours = daly_waste(daly_interval_s(cost_s, mtbf_s), cost_s, mtbf_s)
    others = (mtbf_s * 10 ** (power / 50) for power in range(-200, 51))
    assert ours <= 1.01 * min(daly_waste(other_s, cost_s, mtbf_s) for other_s in others)


@relaxed
@given(seconds, st.floats(min_value=1e-9, max_value=1e-3))
def test_dalys_interval_tends_to_youngs(mtbf_s: float, ratio: float) -> None:
    daly_s, young_s = (f(ratio * mtbf_s, mtbf_s) for f in (daly_interval_s, young_interval_s))
    assert daly_s < young_s
    assert daly_s == pytest.approx(young_s, rel=math.sqrt(ratio))


def test_dalys_interval_where_a_save_costs_more_than_failures_leave() -> None:
    assert daly_interval_s(20.0, 10.0) == 10.0
    assert daly_interval_s(1e6, 10.0) == 10.0


@relaxed
@given(seconds, seconds, st.floats(min_value=1.0, max_value=100.0))
def test_dalys_interval_is_monotone(cost_s: float, mtbf_s: float, factor: float) -> None:
    base = daly_interval_s(cost_s, mtbf_s)
    assert daly_interval_s(cost_s * factor, mtbf_s) >= base * (1 - 1e-9)
    # His two cases do not meet: at C = 2 M the second one is 9/8 of the first.
    is_other_case = mtbf_s <= cost_s / 2 < mtbf_s * factor
    least = 8 / 9 if is_other_case else 1.0
    assert daly_interval_s(cost_s, mtbf_s * factor) >= base * least * (1 - 1e-9)


def test_fixed_and_none() -> None:
    observed = measured(1.0)
    fixed = IntervalRule(policy=IntervalPolicy.FIXED, interval_steps=7)
    assert interval_steps(fixed, observed) == 7
    none = decide_interval(IntervalRule(policy=IntervalPolicy.NONE), observed)
    assert none.interval_steps is None
    assert "ckpt.policy=none" in none.reason


def test_first_save_measures_then_the_prior_holds_until_a_cost_is_known() -> None:
    rule = IntervalRule(interval_steps=500, first_save_step=10)
    assert interval_steps(rule, unmeasured()) == 10
    assert interval_steps(rule, unmeasured(num_saves_started=1)) == 500


def test_first_save_is_never_later_than_the_interval() -> None:
    rule = IntervalRule(interval_steps=4, first_save_step=10)
    assert interval_steps(rule, unmeasured()) == 4


def test_the_optimum_in_steps_with_its_numbers() -> None:
    # sqrt(1080) = 32.86 s by Young, 0.13 s less by Daly
    decision = decide_interval(IntervalRule(), measured(0.2, step_s=0.5, mtbf_s=2700.0))
    assert decision.interval_steps == 65
    assert decision.reason == (
        "adaptive: cost 0.2 s (median of 1 saves) and MTBF 2700 s make 32.73 s by Young and Daly, "
        "65 steps of 0.5 s"
    )


def costs(*costs_s: float, steps_s: tuple[float, ...] = (0.1,)) -> IntervalObservation:
    return IntervalObservation(mtbf=mtbf(), step_times_s=steps_s, save_costs_s=costs_s)


def test_one_slow_save_does_not_move_the_interval() -> None:
    usual = costs(0.1, 0.1, 0.1)
    with_outlier = costs(0.1, 30.0, 0.1, steps_s=(0.1, 0.1, 9.0))
    rule = IntervalRule()
    assert interval_steps(rule, usual) == interval_steps(rule, with_outlier)


def test_old_costs_are_forgotten() -> None:
    rule = IntervalRule()
    drifted = costs(*[9.0] * 20, *[0.1] * 9)
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
@given(seconds, seconds, seconds, seconds)
def test_interval_is_monotone(
    cost_s: float, step_s: float, mtbf_s: float, persist_s: float
) -> None:
    def steps(cost: float, mtbf: float, persist: float) -> int:
        observed = measured(cost, step_s=step_s, mtbf_s=mtbf, persist_s=persist)
        return interval_steps(IntervalRule(), observed)

    base = steps(cost_s, mtbf_s, persist_s)
    assert base >= 1
    assert base >= persist_s / step_s
    assert steps(cost_s * 2, mtbf_s, persist_s) >= base
    assert steps(cost_s, mtbf_s, persist_s * 2) >= base
    if cost_s < 2 * mtbf_s:
        assert steps(cost_s, mtbf_s * 2, persist_s) >= base


def test_every_bad_value_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        IntervalRule(interval_steps=0, first_save_step=0, prior_mtbf_s=0.0)
    assert len(caught.value.problems) == 3
    for key in ("ckpt.interval_steps=0", "ckpt.first_save_step=0", "ckpt.prior_mtbf_s=0.0"):
        assert key in str(caught.value)


def test_priors_of_groups_are_named() -> None:
    with pytest.raises(ConfigError, match=r"ckpt\.prior_mtbf_s\.a100=-1"):
        IntervalRule(prior_mtbf_s={"a100": -1.0, "v100": 5.0})
