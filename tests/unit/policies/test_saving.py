from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_fw.policies import IntervalDecision, SaveObservation, decide_save

EVERY_10 = IntervalDecision(interval_steps=10, reason="fixed: every 10 steps")
NEVER = IntervalDecision(interval_steps=None, reason="off")


def test_saves_when_the_interval_is_over_and_says_why() -> None:
    decision = decide_save(SaveObservation(step=30, last_saved_step=20, interval=EVERY_10))
    assert decision.save
    assert "10 steps since step 20; fixed: every 10 steps" in decision.reason


def test_does_not_save_before() -> None:
    assert not decide_save(SaveObservation(step=29, last_saved_step=20, interval=EVERY_10)).save


def test_saves_at_the_final_step_but_not_twice() -> None:
    final = SaveObservation(step=23, last_saved_step=20, interval=EVERY_10, is_final=True)
    assert decide_save(final).save
    again = SaveObservation(step=23, last_saved_step=23, interval=EVERY_10, is_final=True)
    assert not decide_save(again).save


def test_postpones_while_a_save_is_in_flight() -> None:
    busy = SaveObservation(step=30, last_saved_step=20, interval=EVERY_10, save_in_flight=True)
    decision = decide_save(busy)
    assert not decision.save
    assert decision.is_postponed
    assert "in flight" in decision.reason


def test_no_interval_means_no_save() -> None:
    final = SaveObservation(step=30, last_saved_step=0, interval=NEVER, is_final=True)
    assert not decide_save(final).save


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200), st.integers(1, 40), st.booleans())
def test_no_stretch_without_a_save_is_longer_than_the_interval(
    num_steps: int, interval_steps: int, first_is_postponed: bool
) -> None:
    interval = IntervalDecision(interval_steps=interval_steps, reason="test")
    saved, busy = [0], first_is_postponed
    for step in range(1, num_steps + 1):
        observed = SaveObservation(
            step=step,
            last_saved_step=saved[-1],
            interval=interval,
            is_final=step == num_steps,
            save_in_flight=busy and step == interval_steps,
        )
        if decide_save(observed).save:
            saved.append(step)
    gaps = [after - before for before, after in itertools.pairwise(saved)]
    assert all(gap <= interval_steps + first_is_postponed for gap in gaps)
    assert saved[-1] == num_steps or (first_is_postponed and num_steps == interval_steps)


def after_failures(step: int, num_failed: int, last_failed_step: int = 20) -> SaveObservation:
    return SaveObservation(
        step=step,
        last_saved_step=10,
        interval=EVERY_10,
        num_failed=num_failed,
        last_failed_step=last_failed_step,
    )


def test_a_failed_save_is_made_up_for_soon_and_then_less_often() -> None:
    gaps = [
        next(gap for gap in range(1, 100) if decide_save(after_failures(20 + gap, failed)).save)
        for failed in range(1, 7)
    ]
    assert gaps == [2, 4, 8, 10, 10, 10]
    reason = decide_save(after_failures(24, 2)).reason
    assert reason == "2 saves in a row have failed, the last of step 20"


def test_the_final_step_is_saved_after_any_failures() -> None:
    observed = SaveObservation(
        step=21, last_saved_step=10, interval=EVERY_10, is_final=True, num_failed=5
    )
    assert decide_save(observed).save
