from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_fw.errors import ConfigError
from hetero_fw.policies import decide_retention

steps = st.sets(st.integers(1, 30), max_size=12)


def test_keeps_the_newest_k() -> None:
    committed = [10, 20, 30, 40, 50]
    decision = decide_retention(committed, verified_steps=[40, 50], keep_latest_k=3)
    assert decision.delete_steps == (10, 20)
    assert "keep [50, 40, 30]" in decision.reason


def test_deletes_nothing_while_nothing_is_verified() -> None:
    assert decide_retention([1, 2, 3, 4], verified_steps=[], keep_latest_k=2).delete_steps == ()


def test_keeps_verified_ones_that_are_older_than_the_newest_k() -> None:
    decision = decide_retention([10, 20, 30, 40, 50], verified_steps=[10, 20], keep_latest_k=2)
    assert decision.delete_steps == ()


def test_keep_latest_k_below_two_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ckpt\.keep_latest_k=1 must be at least 2"):
        decide_retention([1, 2], verified_steps=[1, 2], keep_latest_k=1)


@settings(max_examples=50, deadline=None)
@given(steps, steps, st.integers(2, 5))
def test_what_must_stay_stays(committed: set[int], verified: set[int], keep_latest_k: int) -> None:
    decision = decide_retention(committed, verified_steps=verified, keep_latest_k=keep_latest_k)
    deleted = set(decision.delete_steps)
    present = committed & verified
    assert deleted <= committed
    assert not deleted & set(sorted(committed)[-keep_latest_k:])
    assert not deleted & set(sorted(present)[-2:])
    assert all(any(newer > step for newer in present - deleted) for step in deleted)
