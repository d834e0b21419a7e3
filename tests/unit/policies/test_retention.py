from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_fw.errors import ConfigError
from hetero_fw.policies import CommittedCheckpoint, MonitorMode, RetentionRule, decide_retention


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
        assert not [step for step in deleted if step % rule.keep_every_n_steps == 0]


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
