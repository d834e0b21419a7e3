from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_fw.hardware import DeviceKind
from hetero_fw.policies import AttemptRecord, DeviceGroup, learn_failure_rates

relaxed = settings(max_examples=50, deadline=None)
seconds = st.floats(min_value=1.0, max_value=1e6)
A100 = DeviceGroup(name="a100", kind=DeviceKind.CUDA, num_devices=8)
V100 = DeviceGroup(name="v100", kind=DeviceKind.CUDA, num_devices=8)
HOST = DeviceGroup(name="host", kind=DeviceKind.CPU, num_devices=8)
BOTH = {"a100": 8, "v100": 8}


def failed(duration_s: float, group: str | None = "a100") -> AttemptRecord:
    return AttemptRecord(
        duration_s=duration_s, num_devices=BOTH, has_failed=True, failed_group=group
    )


def stopped(duration_s: float) -> AttemptRecord:
    return AttemptRecord(duration_s=duration_s, num_devices=BOTH, has_failed=False)


def mtbf_s(
    attempts: list[AttemptRecord],
    groups: tuple[DeviceGroup, ...] = (A100, V100),
    prior_s: float | dict[str, float] = 10800.0,
    elapsed_s: float = 0.0,
) -> float:
    return learn_failure_rates(groups, prior_s, attempts).estimate(elapsed_s).mtbf_s


def test_the_prior_of_the_cluster_holds_before_anything_was_seen() -> None:
    assert mtbf_s([]) == pytest.approx(10800.0)
    assert mtbf_s([], groups=(A100, HOST)) == pytest.approx(10800.0)


def test_the_prior_of_the_cluster_is_shared_out_by_kind() -> None:
    rates = learn_failure_rates((A100, HOST), 10800.0, []).rates(0.0)
    assert rates["a100"] / rates["host"] == pytest.approx(1.7e8 / 6.9e7)


def test_priors_by_group_are_for_one_device() -> None:
    assert mtbf_s([], prior_s={"a100": 8000.0, "v100": 4000.0}) == pytest.approx(1000.0 / 3)


def test_a_group_without_a_prior_has_that_of_its_kind() -> None:
    rates = learn_failure_rates((A100, V100), {"v100": 800.0, "gone": 1.0}, []).rates(0.0)
    assert rates["a100"] == pytest.approx(8 / 6.9e7)
    assert rates["v100"] == pytest.approx(8 / 800.0)


def test_many_failures_overrule_the_prior() -> None:
    assert mtbf_s([failed(60.0)] * 100) == pytest.approx(60.0, rel=1e-3)


def test_the_group_that_fails_is_the_one_that_is_blamed() -> None:
    rates = learn_failure_rates((A100, V100), 10800.0, [failed(600.0, "v100")] * 30).rates(0.0)
    assert rates["v100"] == pytest.approx(1 / 600.0, rel=0.05)
    assert rates["a100"] < rates["v100"] / 20


def test_leaving_the_failing_group_out_helps() -> None:
    attempts = [failed(600.0, "v100")] * 30
    assert mtbf_s(attempts, groups=(A100,)) > 10800.0


def test_a_failure_of_unknown_origin_counts_once() -> None:
    known, unknown = ([failed(600.0, group)] * 9 for group in ("a100", None))
    assert mtbf_s(unknown) == pytest.approx(mtbf_s(known))


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_stepped_rate_is_followed(factor: float) -> None:
    before = [failed(600.0)] * 40
    after = [failed(600.0 * factor)] * 12
    assert mtbf_s(before + after) == pytest.approx(600.0 * factor, rel=1.0)
    assert mtbf_s(before + after * 3) == pytest.approx(600.0 * factor, rel=0.05)


def test_a_long_quiet_attempt_is_followed_while_it_runs() -> None:
    attempts = [failed(600.0)] * 40
    assert mtbf_s(attempts, elapsed_s=48_000.0) == pytest.approx(11 * 600.0, rel=0.05)


def test_a_group_that_never_fails_keeps_a_rate() -> None:
    rates = learn_failure_rates((A100, V100), 10800.0, [failed(60.0)] * 7000).rates(0.0)
    assert 0 < rates["v100"] < 1e-6


def test_the_reason_has_the_numbers() -> None:
    reason = learn_failure_rates((A100, V100), 10800.0, [failed(600.0)]).estimate(0.0).reason
    assert "1 failures" in reason
    assert "a100" in reason
    assert "prior of 1.08e+04 s" in reason


@relaxed
@given(st.lists(seconds, max_size=12), seconds, seconds)
def test_estimate_is_monotone(gaps_s: list[float], last_s: float, more_s: float) -> None:
    attempts = [failed(gap_s) for gap_s in gaps_s]
    base = mtbf_s([*attempts, stopped(last_s)])
    assert mtbf_s([*attempts, stopped(last_s + more_s)]) > base
    assert mtbf_s([*attempts, stopped(last_s)], elapsed_s=more_s) > base
    assert mtbf_s([*attempts, stopped(last_s)], prior_s=21600.0) > base
    assert mtbf_s([*attempts, failed(last_s)]) < mtbf_s([*attempts, failed(last_s + more_s)])


@relaxed
@given(st.lists(seconds, max_size=12), seconds)
def test_an_attempt_that_was_stopped_is_as_good_as_one_that_went_on(
    gaps_s: list[float], pause_at_s: float
) -> None:
    whole = [failed(gap_s + pause_at_s) for gap_s in gaps_s]
    halves = [part for gap_s in gaps_s for part in (stopped(pause_at_s), failed(gap_s))]
    assert mtbf_s(halves) == pytest.approx(mtbf_s(whole))


@relaxed
@given(st.lists(st.tuples(seconds, st.booleans()), max_size=12), seconds)
def test_splitting_a_group_changes_nothing(
    attempts: list[tuple[float, bool]], elapsed_s: float
) -> None:
    one = DeviceGroup(name="all", kind=DeviceKind.CUDA, num_devices=16)
    as_one = [
        AttemptRecord(
            duration_s=gap_s, num_devices={"all": 16}, has_failed=True, failed_group="all"
        )
        for gap_s, _ in attempts
    ]
    as_two = [failed(gap_s, "a100" if first else "v100") for gap_s, first in attempts]
    assert mtbf_s(as_two, elapsed_s=elapsed_s) == pytest.approx(
        mtbf_s(as_one, groups=(one,), elapsed_s=elapsed_s)
    )
