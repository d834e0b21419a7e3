from __future__ import annotations

import pytest

from hetero_fw.policies import JustInTimeObservation, decide_just_in_time


def observed(
    *,
    step: int = 120,
    safe_step: int = 100,
    step_time_s: float | None = 1.0,
    save_time_s: float | None = 5.0,
) -> JustInTimeObservation:
    return JustInTimeObservation(
        step=step,
        safe_step=safe_step,
        step_time_s=step_time_s,
        save_time_s=save_time_s,
        grace_s=60.0,
    )


def test_work_that_is_dearer_than_a_save_is_saved() -> None:
    decision = decide_just_in_time(observed())
    assert decision.save
    assert decision.reason == "20 steps, 20 s of work, since step 100"


@pytest.mark.parametrize(
    ("observation", "reason"),
    [
        (observed(safe_step=120), "step 120 is safe already"),
        (observed(step=104), "to compute 4 steps again takes 4 s, a save 5 s"),
        (
            observed(step=10_000, save_time_s=61.0),
            "a save takes 61 s, longer than the 60 s it may",
        ),
    ],
)
def test_what_is_not_worth_it(observation: JustInTimeObservation, reason: str) -> None:
    decision = decide_just_in_time(observation)
    assert not decision.save
    assert decision.reason == reason


def test_what_is_not_known_speaks_for_the_save() -> None:
    assert decide_just_in_time(observed(step=101, save_time_s=None)).save
    assert decide_just_in_time(observed(step=101, step_time_s=None)).save
    unknown = decide_just_in_time(observed(step_time_s=None, save_time_s=None))
    assert unknown.reason == "20 steps since step 100"
