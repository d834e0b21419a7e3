from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_fw.errors import ConfigError
from hetero_fw.policies import (
    CommittedCheckpoint,
    MonitorMode,
    RetentionRule,
    decide_retention,
    decide_room,
)


def committed(
    steps: Collection[int], verified: Collection[int], metrics: dict[int, float] | None = None
) -> list[CommittedCheckpoint]:
    return [
        CommittedCheckpoint(
            step=step, is_verified=step in verified, metric=(metrics or {}).get(step)
        )
        for step in steps
    ]


def test_keeps_the_newest_k() -> None:
    checkpoints = committed([10, 20, 30, 40, 50], verified=[40, 50])
    decision = decide_retention(checkpoints, RetentionRule(keep_latest_k=3))
    assert decision.delete_steps == (10, 20)
    assert "keep [50, 40, 30]" in decision.reason


def test_deletes_nothing_while_nothing_is_verified() -> None:
    checkpoints = committed([1, 2, 3, 4], verified=[])
    assert decide_retention(checkpoints, RetentionRule(keep_latest_k=2)).delete_steps == ()


def test_keeps_verified_ones_that_are_older_than_the_newest_k() -> None:
    checkpoints = committed([10, 20, 30, 40, 50], verified=[10, 20])
    assert decide_retention(checkpoints, RetentionRule(keep_latest_k=2)).delete_steps == ()


def test_keeps_the_last_finite_one_though_it_is_not_verified() -> None:
    checkpoints = [
        CommittedCheckpoint(step=step, is_verified=step < 3, is_finite=step < 4)
        for step in range(1, 8)
    ]
    decision = decide_retention(checkpoints, RetentionRule(keep_latest_k=2))
    assert decision.delete_steps == ()
    checkpoints[2:3] = [CommittedCheckpoint(step=3, is_verified=True)]
    decision = decide_retention(checkpoints, RetentionRule(keep_latest_k=2))
    assert decision.delete_steps == (1,)


def test_keeps_the_best_by_either_mode_and_the_newest_of_equal_ones() -> None:
    metrics = {1: 0.5, 2: 0.1, 3: 0.1, 4: 0.9, 5: 0.4, 6: 0.4}
    checkpoints = committed([1, 2, 3, 4, 5, 6], [5, 6], metrics)
    low = RetentionRule(keep_latest_k=2, monitor="val_loss")
    assert decide_retention(checkpoints, low).delete_steps == (1, 2, 4)
    assert "steps [3] best by val_loss" in decide_retention(checkpoints, low).reason
    high = RetentionRule(
        keep_latest_k=2, keep_best=2, monitor="val_acc", monitor_mode=MonitorMode.MAX
    )
    assert decide_retention(checkpoints, high).delete_steps == (2, 3)


def test_without_a_monitor_there_is_no_best() -> None:
    checkpoints = committed([1, 2, 3], [2, 3], {1: 0.0})
    assert decide_retention(checkpoints, RetentionRule(keep_latest_k=2)).delete_steps == (1,)


def test_keeps_those_of_every_nth_step() -> None:
    checkpoints = committed(range(5, 45, 5), verified=[35, 40])
    rule = RetentionRule(keep_latest_k=2, keep_every_n_steps=10)
    assert decide_retention(checkpoints, rule).delete_steps == (5, 15, 25)
    assert "keep_every_n_steps=10" in decide_retention(checkpoints, rule).reason


def test_keeps_the_first_at_or_after_each_multiple() -> None:
    checkpoints = committed([3, 7, 13, 17, 24, 28, 41, 55, 56], verified=[55, 56])
    rule = RetentionRule(keep_latest_k=2, keep_every_n_steps=10)
    assert decide_retention(checkpoints, rule).delete_steps == (3, 7, 17, 28)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=40),
    st.integers(1, 12),
)
def test_what_was_kept_for_good_stays(gaps: list[tuple[int, bool]], every: int) -> None:
    """Whatever is saved later, also where a later attempt goes back some steps.

    Until one of its own step replaces it.
    """
    rule = RetentionRule(keep_latest_k=2, keep_every_n_steps=every)
    there: dict[int, CommittedCheckpoint] = {}
    kept: dict[int, CommittedCheckpoint] = {}
    replaced: set[int] = set()
    step = attempt = 0
    for gap, goes_back in gaps:
        attempt += goes_back
        step = max(0, step - 4) + gap if goes_back else step + gap
        replaced |= {step // every} if step in there else set()
        there[step] = CommittedCheckpoint(step=step, attempt=attempt, is_verified=True)
        kept.setdefault(step // every, there[step])
        for gone in decide_retention(there.values(), rule).delete_steps:
            del there[gone]
        for span, item in kept.items():
            assert span == 0 or span in replaced or there.get(item.step) is item


def test_without_room_the_oldest_of_the_newest_goes_and_fewer_are_kept() -> None:
    checkpoints = committed([10, 20, 30, 40], verified=[30, 40])
    decision = decide_room(checkpoints, RetentionRule(keep_latest_k=5))
    assert decision.delete_steps == (10,)
    assert decision.rule == RetentionRule(keep_latest_k=3)
    decision = decide_room(checkpoints[1:], RetentionRule(keep_latest_k=3))
    assert decision.delete_steps == (20,)
    assert decision.rule == RetentionRule(keep_latest_k=2)
    decision = decide_room(checkpoints[2:], RetentionRule(keep_latest_k=3))
    assert decision.delete_steps == ()
    assert decision.rule is None


def test_without_room_what_is_kept_besides_goes_last() -> None:
    metrics = {10: 0.2, 12: 0.1, 20: 3.0, 30: 2.0, 40: 2.0, 50: 2.0}
    rule = RetentionRule(keep_latest_k=3, keep_best=2, monitor="loss", keep_every_n_steps=10)
    steps = list(metrics)
    order = []
    while True:
        left = committed(steps, verified=[40, 50], metrics=metrics)
        assert decide_room(left, rule, spares_kept_besides=True).delete_steps == ()
        decision = decide_room(left, rule)
        if decision.rule is None:
            break
        rule = decision.rule
        order += decision.delete_steps
        steps.remove(decision.delete_steps[0])
    # Each span's first, then the worse of the best.
    assert order == [20, 30, 10, 12]
    assert steps == [40, 50]
    assert (rule.keep_latest_k, rule.keep_best) == (2, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_latest_k": 1}, r"ckpt\.keep_latest_k=1 must be at least 2"),
        ({"keep_best": -1}, r"ckpt\.keep_best=-1 must be at least 0"),
        ({"keep_every_n_steps": 0}, r"ckpt\.keep_every_n_steps=0 must be at least 1"),
    ],
)
def test_rules_that_are_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RetentionRule(**options)  # type: ignore[arg-type]


rules = st.builds(
    RetentionRule,
    keep_latest_k=st.integers(2, 5),
    keep_best=st.integers(0, 3),
    monitor=st.sampled_from([None, "loss"]),
    monitor_mode=st.sampled_from(MonitorMode),
    keep_every_n_steps=st.none() | st.integers(1, 10),
)
checkpoint_sets = st.lists(
    st.builds(
        CommittedCheckpoint,
        step=st.integers(1, 30),
        is_verified=st.booleans(),
        is_finite=st.sampled_from([True, True, True, False]),
        metric=st.none() | st.floats(-5, 5),
    ),
    unique_by=lambda checkpoint: checkpoint.step,
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(checkpoint_sets, rules)
def test_what_must_stay_stays(checkpoints: list[CommittedCheckpoint], rule: RetentionRule) -> None:
    deleted = set(decide_retention(checkpoints, rule).delete_steps)
    steps = sorted(item.step for item in checkpoints)
    finite = sorted(item.step for item in checkpoints if item.is_finite)
    sound = sorted(item.step for item in checkpoints if item.is_verified and item.is_finite)
    assert deleted <= set(steps)
    assert not deleted & set(steps[-rule.keep_latest_k :])
    assert not deleted & set(sound[-2:])
    assert not deleted & set(finite[-1:])
    assert all(any(newer > step for newer in set(sound) - deleted) for step in deleted)
    if rule.keep_every_n_steps is not None:
        spans: dict[int, list[int]] = {}
        for step in finite:
            spans.setdefault(step // rule.keep_every_n_steps, []).append(step)
        assert not deleted & {min(steps) for span, steps in spans.items() if span > 0}


@settings(max_examples=200, deadline=None)
@given(checkpoint_sets, rules)
def test_no_deleted_one_is_better_than_a_kept_best(
    checkpoints: list[CommittedCheckpoint], rule: RetentionRule
) -> None:
    deleted = set(decide_retention(checkpoints, rule).delete_steps)
    known = [item for item in checkpoints if item.is_finite and item.metric is not None]
    gone = [item for item in known if item.step in deleted]
    kept = [item for item in known if item.step not in deleted]
    sign = 1 if rule.monitor_mode is MonitorMode.MIN else -1
    if rule.monitor is None or rule.keep_best == 0 or not gone:
        return
    scores = sorted(sign * item.metric for item in kept if item.metric is not None)
    assert len(scores) >= rule.keep_best
    assert all(
        scores[rule.keep_best - 1] <= sign * item.metric for item in gone if item.metric is not None
    )


@settings(max_examples=100, deadline=None)
@given(checkpoint_sets, rules)
def test_nothing_more_goes_when_asked_again(
    checkpoints: list[CommittedCheckpoint], rule: RetentionRule
) -> None:
    deleted = decide_retention(checkpoints, rule).delete_steps
    left = [item for item in checkpoints if item.step not in deleted]
    assert decide_retention(left, rule).delete_steps == ()


def test_what_was_left_behind_does_not_crowd_out_what_a_later_attempt_saves() -> None:
    left = [CommittedCheckpoint(step=step, is_verified=True) for step in (50, 70, 80, 90)]
    saved = [CommittedCheckpoint(step=60, attempt=1, is_verified=True)]
    rule = RetentionRule(keep_latest_k=2)
    assert decide_retention([*left, *saved], rule).delete_steps == (50, 70, 80)
    saved += [CommittedCheckpoint(step=65, attempt=1, is_verified=False)]
    assert decide_retention([*left, *saved], rule).delete_steps == (50, 70, 80)
    saved[1:] = [CommittedCheckpoint(step=65, attempt=1, is_verified=True)]
    assert decide_retention([*left, *saved], rule).delete_steps == (50, 70, 80, 90)


@settings(max_examples=200, deadline=None)
@given(checkpoint_sets, rules, st.booleans())
def test_making_room_takes_one_and_never_the_last_two_that_are_sound(
    checkpoints: list[CommittedCheckpoint], rule: RetentionRule, spares: bool
) -> None:
    decision = decide_room(checkpoints, rule, spares_kept_besides=spares)
    sound = sorted(item.step for item in checkpoints if item.is_verified and item.is_finite)
    assert len(decision.delete_steps) <= 1
    assert not set(decision.delete_steps) & set(sound[-2:])
    assert not decision.delete_steps or any(step > decision.delete_steps[0] for step in sound)
    would_go = set(decide_retention(checkpoints, replace(rule, keep_latest_k=2)).delete_steps)
    assert not spares or set(decision.delete_steps) <= would_go
    assert not would_go or set(decision.delete_steps) <= would_go
