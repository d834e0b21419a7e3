from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_fw.policies import (
    PERMANENT_STORAGE_ERRORS,
    RetryDecision,
    RetryObservation,
    RetryRule,
    StorageErrorKind,
    decide_retry,
)

RULE = RetryRule(max_tries=5, first_pause_s=1.0, max_pause_s=6.0)
TRANSIENT = StorageErrorKind.TRANSIENT


def decide(
    num_tries: int,
    kind: StorageErrorKind = TRANSIENT,
    *,
    elapsed_s: float = 0.0,
    deadline_s: float = 100.0,
    jitter: float = 1.0,
) -> RetryDecision:
    observation = RetryObservation(
        num_tries=num_tries, elapsed_s=elapsed_s, deadline_s=deadline_s, kind=kind, jitter=jitter
    )
    return decide_retry(RULE, observation)


def test_pauses_double_up_to_the_cap_and_tries_end() -> None:
    decisions = [decide(num_tries) for num_tries in range(1, 6)]
    assert [decision.pause_s for decision in decisions] == [1.0, 2.0, 4.0, 6.0, 0.0]
    assert [decision.retry for decision in decisions] == [True] * 4 + [False]
    assert decisions[0].reason == "transient: try 2 of 5 in 1.00 s"
    assert decisions[4].reason == "transient: failed 5 times of 5"


@pytest.mark.parametrize("kind", sorted(PERMANENT_STORAGE_ERRORS))
def test_permanent_errors_are_never_retried(kind: StorageErrorKind) -> None:
    decision = decide(1, kind)
    assert not decision.retry
    assert kind.value in decision.reason


def test_an_unknown_error_gets_one_more_try() -> None:
    assert decide(1, StorageErrorKind.UNKNOWN).retry
    assert not decide(2, StorageErrorKind.UNKNOWN).retry


def test_no_pause_ends_after_the_deadline() -> None:
    assert decide(1, elapsed_s=8.9, deadline_s=10.0).retry
    late = decide(1, elapsed_s=9.0, deadline_s=10.0)
    assert not late.retry
    assert late.reason == "transient: 1.0 s are left of 10 s after 1 tries"
    assert "0.0 s are left" in decide(1, elapsed_s=11.0, deadline_s=10.0).reason


def test_ranks_that_failed_together_come_back_apart() -> None:
    assert [decide(2, jitter=jitter).pause_s for jitter in (0.0, 0.5, 1.0)] == [1.0, 1.5, 2.0]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(StorageErrorKind),
    st.integers(1, 2000),
    st.floats(0.0, 1e6),
    st.floats(0.0, 1e6),
    st.floats(0.0, 1.0),
)
def test_any_observation_gets_a_bounded_answer(
    kind: StorageErrorKind, num_tries: int, elapsed_s: float, deadline_s: float, jitter: float
) -> None:
    decision = decide(num_tries, kind, elapsed_s=elapsed_s, deadline_s=deadline_s, jitter=jitter)
    assert decision.reason
    assert 0.0 <= decision.pause_s <= RULE.max_pause_s
    if decision.retry:
        assert decision.pause_s < deadline_s - elapsed_s
        assert num_tries < RULE.max_tries
    else:
        assert decision.pause_s == 0.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tries": 0}, "max_tries=0"),
        ({"max_unknown_tries": 0}, "max_unknown_tries=0"),
        ({"first_pause_s": -1.0}, "first_pause_s=-1.0"),
        ({"first_pause_s": 9.0, "max_pause_s": 8.0}, "max_pause_s=8.0"),
    ],
)
def test_impossible_rules_are_refused(fields: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RetryRule(**fields)  # type: ignore[arg-type]
