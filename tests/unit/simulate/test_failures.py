from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_fw.errors import ConfigError
from hetero_fw.simulate import StepFunction, draw_failures, parse_node_trace
from tests.unit.simulate.regimes import load_trace

relaxed = settings(max_examples=50, deadline=None)


def test_a_step_function_has_the_value_of_the_last_step() -> None:
    function = StepFunction(starts_s=(0.0, 10.0), values=(1.0, 2.0))
    assert [function.at(time_s) for time_s in (0.0, 9.9, 10.0, 1e9)] == [1.0, 1.0, 2.0, 2.0]
    assert list(function.pieces(15.0)) == [(0.0, 10.0, 1.0), (10.0, 15.0, 2.0)]
    assert list(function.pieces(5.0)) == [(0.0, 5.0, 1.0)]


@pytest.mark.parametrize("starts_s", [(), (1.0, 2.0), (0.0, 0.0), (0.0,)])
def test_a_step_function_starts_at_zero_and_ascends(starts_s: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must ascend from 0"):
        StepFunction(starts_s=starts_s, values=(1.0, 2.0))


@relaxed
@given(st.integers(0, 2**31), st.floats(1.0, 1e4), st.floats(1.0, 1e5))
def test_failures_come_in_order_and_in_time(seed: int, mtbf_s: float, end_s: float) -> None:
    mtbf = StepFunction(starts_s=(0.0, end_s / 3), values=(mtbf_s, mtbf_s * 4))
    times_s = [failure.time_s for failure in draw_failures(mtbf, end_s, seed)]
    assert times_s == sorted(times_s)
    assert all(0.0 < time_s < end_s for time_s in times_s)
    assert times_s == [failure.time_s for failure in draw_failures(mtbf, end_s, seed)]


def test_failures_have_the_rate_that_was_asked_for() -> None:
    mtbf = StepFunction(starts_s=(0.0, 10_000.0), values=(10.0, 40.0))
    failures = draw_failures(mtbf, 50_000.0, 1, "a100")
    early = sum(failure.time_s < 10_000.0 for failure in failures)
    assert early == pytest.approx(1000, rel=0.1)
    assert len(failures) - early == pytest.approx(1000, rel=0.1)
    assert {failure.group for failure in failures} == {"a100"}


@pytest.mark.parametrize(
    ("name", "num_removed", "num_failures", "end_s"),
    [("g4dn", 74, 48, 38_760.0), ("p3", 167, 79, 40_920.0)],
)
def test_real_traces(name: str, num_removed: int, num_failures: int, end_s: float) -> None:
    trace = load_trace(name)
    assert sum(trace.num_removed) == num_removed
    assert len(trace.failures()) == num_failures
    assert trace.end_s == end_s
    assert trace.mtbf_s() == end_s / num_failures


@pytest.mark.parametrize(
    "text", ["", "time_s,num_added,num_removed", "a,b\n1,2", "time_s,num_added,num_removed\n1,x,2"]
)
def test_what_is_no_trace_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="node trace"):
        parse_node_trace(text.splitlines())
