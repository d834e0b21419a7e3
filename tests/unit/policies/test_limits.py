"""Emergency saves: never without a limit that held, never twice within a cool-down."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_fw.errors import ConfigError
from hetero_fw.policies import (
    COUNTERS,
    Limit,
    LimitRule,
    LimitState,
    Measure,
    Reading,
    after_emergency_save,
    decide_emergency_save,
    observe_reading,
)

MEMORY = Measure.HOST_MEMORY_PERCENT
UTILIZATION = Measure.DEVICE_UTILIZATION_PERCENT
XID = Measure.DEVICE_XID_ERRORS
RULE = LimitRule(
    limits={
        MEMORY: Limit(above=95.0, sustained_s=10.0, rearm_below=90.0),
        XID: Limit(above=0.0),
    },
    cooldown_s=600.0,
)


def saves(
    rule: LimitRule, course: list[tuple[float, dict[Measure, float]]]
) -> list[tuple[float, str]]:
    """Times and reasons of the saves of one rank that obeys at once; `course` is (time, values)."""
    state, found = LimitState(), []
    for now_s, values in course:
        state = observe_reading(rule, state, Reading(values=values), now_s)
        decision = decide_emergency_save(rule, state, now_s)
        if decision.save:
            found.append((now_s, decision.reason))
            state = after_emergency_save(state, now_s)
    return found


def constant(value: float, until_s: int, measure: Measure = MEMORY) -> list:
    return [(float(now_s), {measure: value}) for now_s in range(until_s)]


def test_what_stays_above_its_limit_is_saved_once_for_ever() -> None:
    ((now_s, reason),) = saves(RULE, constant(97.25, 5000))
    assert now_s == 10.0
    assert reason == "host_memory_percent 97.25 %, above 95 % for 10.0 s"


def test_a_busy_device_does_not_save_for_ever() -> None:
    rule = LimitRule(
        limits={UTILIZATION: Limit(above=95.0, sustained_s=5.0, rearm_below=50.0)}, cooldown_s=60.0
    )
    busy = [(float(t), {UTILIZATION: 99.0 if t % 7 else 60.0}) for t in range(4000)]
    assert len(saves(rule, busy)) == 1, "short breaks do not re-arm it"


@pytest.mark.parametrize(("dip", "count"), [(94.0, 1), (90.0, 1), (89.0, 2)])
def test_it_asks_again_only_after_it_fell_below_the_lower_mark(dip: float, count: int) -> None:
    course = [(float(t), {MEMORY: dip if 700 <= t < 710 else 97.0}) for t in range(1400)]
    assert len(saves(RULE, course)) == count


def test_a_dip_or_a_missing_reading_begins_the_time_anew() -> None:
    for gap in ({MEMORY: 94.0}, {}):
        course = [(float(t), gap if t == 9 else {MEMORY: 97.0}) for t in range(30)]
        assert [now_s for now_s, _ in saves(RULE, course)] == [20.0]


def test_cool_down_holds_over_all_limits_and_what_still_holds_then_asks() -> None:
    course = [(float(t), {MEMORY: 97.0, XID: 0.0 if t < 100 else 2.0}) for t in range(1000)]
    (first, _), (second, reason) = saves(RULE, course)
    assert (first, second) == (10.0, 610.0)
    assert reason.startswith("device_xid_errors 2, above 0")


def test_counters_count_from_the_first_reading_and_from_each_save() -> None:
    rule = LimitRule(limits={XID: Limit(above=0.0)}, cooldown_s=0.0)
    counts = [7.0, 7.0, 8.0, 8.0, 8.0, 9.0, 9.0]
    course = [(float(t), {XID: count}) for t, count in enumerate(counts)]
    assert [now_s for now_s, _ in saves(rule, course)] == [2.0, 5.0]


def test_a_save_that_another_rank_asked_for_answers_this_one_too() -> None:
    state = LimitState()
    for now_s in range(6):
        state = observe_reading(RULE, state, Reading(values={MEMORY: 97.0}), now_s)
    state = after_emergency_save(state, 5.0)
    for now_s in range(6, 2000):
        state = observe_reading(RULE, state, Reading(values={MEMORY: 97.0}), now_s)
        assert not decide_emergency_save(RULE, state, now_s).save


def test_the_reason_says_what_waits_and_what_the_reading_noted() -> None:
    reading = Reading(values={XID: 0.0})
    state = observe_reading(RULE, LimitState(), reading, 0.0)
    reading = Reading(values={XID: 1.0}, notes={XID: "XID 79"})
    state = observe_reading(RULE, state, reading, 1.0)
    assert "(XID 79)" in decide_emergency_save(RULE, state, 1.0).reason
    state = observe_reading(RULE, after_emergency_save(state, 1.0), Reading(values={XID: 2.0}), 2)
    decision = decide_emergency_save(RULE, state, 2.0)
    assert not decision.save
    assert decision.measure is None
    assert decision.reason.startswith("599 s of cool-down left: device_xid_errors 1, above 0")


def test_limits_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ConfigError, match="rearm_below=99"):
        Limit(above=95.0, rearm_below=99.0)
    with pytest.raises(ConfigError, match="sustained_s=-1"):
        Limit(above=95.0, sustained_s=-1.0)


MEASURES = st.sampled_from([MEMORY, UTILIZATION, XID])
VALUES = st.one_of(st.sampled_from([50.0, 92.0, 97.0]), st.floats(0.0, 100.0))
RULES = st.builds(
    LimitRule,
    limits=st.dictionaries(
        MEASURES,
        st.builds(
            Limit,
            above=st.sampled_from([90.0, 95.0]),
            sustained_s=st.sampled_from([0.0, 2.0, 7.0]),
            rearm_below=st.sampled_from([None, 50.0, 90.0]),
        ),
        min_size=1,
    ),
    cooldown_s=st.sampled_from([0.0, 1.0, 15.0, 60.0]),
)
COURSES = st.lists(st.tuples(st.floats(0.01, 5.0), st.dictionaries(MEASURES, VALUES)), max_size=80)


@settings(max_examples=150, deadline=None)
@given(rule=RULES, steps=COURSES)
def test_one_save_a_cool_down_and_none_without_a_limit_that_held(
    rule: LimitRule, steps: list[tuple[float, dict[Measure, float]]]
) -> None:
    now_s, course, base = 0.0, [], {}
    for waited_s, values in steps:
        now_s += waited_s
        # Counters never fall.
        for measure in COUNTERS & values.keys():
            base[measure] = base.get(measure, 0.0) + values[measure]
            values[measure] = base[measure]
        course.append((now_s, values))
    times = [time_s for time_s, _ in saves(rule, course)]
    for before, after in itertools.pairwise(times):
        assert after - before >= rule.cooldown_s
    for time_s in times:
        assert any(_held(limit, measure, course, time_s) for measure, limit in rule.limits.items())


def _held(
    limit: Limit, measure: Measure, course: list[tuple[float, dict[Measure, float]]], time_s: float
) -> bool:
    """Whether every reading of the last `sustained_s` was there and above the limit."""
    first = next((values[measure] for _, values in course if measure in values), 0.0)
    base = first if measure in COUNTERS else 0.0
    began_s = None
    for now_s, values in reversed([point for point in course if point[0] <= time_s]):
        if measure not in values or values[measure] - base <= limit.above:
            break
        began_s = now_s
    return began_s is not None and time_s - began_s >= limit.sustained_s
