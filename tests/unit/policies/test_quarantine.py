from __future__ import annotations

import math

import pytest

from hetero_fw.policies import RestoredTraining, decide_divergence, is_quarantined


def observed(step: int, loss: float, *earlier_attempts: int) -> RestoredTraining:
    return RestoredTraining(
        restored_step=100, step=step, loss=loss, attempt=7, earlier_attempts=earlier_attempts
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", [101, 105])
def test_a_loss_that_is_not_finite_soon_after_a_restore_ends_the_attempt(
    step: int, loss: float
) -> None:
    decision = decide_divergence(observed(step, loss))
    assert decision.is_divergence
    assert f"loss of step {step} is {loss:g}" in decision.reason
    assert "tried once more" in decision.reason


def test_the_second_attempt_is_the_last() -> None:
    decision = decide_divergence(observed(101, math.nan, 6))
    assert decision.is_divergence
    assert "attempts [6]" in decision.reason
    assert "quarantined" in decision.reason


def test_one_attempt_counts_once() -> None:
    assert "tried once more" in decide_divergence(observed(101, math.nan, 7)).reason
    assert not is_quarantined([7, 7])
    assert is_quarantined([6, 7])
    assert not is_quarantined([])


def test_later_steps_and_finite_losses_are_left_alone() -> None:
    assert not decide_divergence(observed(106, math.nan)).is_divergence
    assert not decide_divergence(observed(101, 1e30)).is_divergence
