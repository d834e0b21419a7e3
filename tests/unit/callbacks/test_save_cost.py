"""The cost of a save is its stall and what it slows down, and nothing else."""

from __future__ import annotations

import pytest

from hetero_fw.callbacks import SaveCostMeter, SaveHistory


def meter(*old_costs_s: float) -> SaveCostMeter:
    made = SaveCostMeter(SaveHistory(costs_s=old_costs_s))
    for taken_s in (1.0, 1.2, 0.8):
        made.step_ended(taken_s, is_disturbed=False)
    return made


def save(made: SaveCostMeter, *steps_s: float, stall_s: float = 0.1, ok: bool = True) -> None:
    made.save_began()
    for taken_s in steps_s:
        made.step_ended(taken_s, is_disturbed=True)
    made.save_ended(stall_s, 2.0, is_committed=ok)


def test_cost_is_stall_and_slowdown() -> None:
    made = meter()
    save(made, 1.5, 1.3)
    assert made.save_costs_s == (pytest.approx(0.9),)
    assert made.persist_times_s == (2.0,)


def test_noise_is_no_slowdown() -> None:
    made = meter()
    save(made, 1.2, 0.8, 1.1, 0.8)
    assert made.save_costs_s == (0.1,)


def test_a_save_that_was_waited_for_costs_its_stall() -> None:
    made = meter()
    save(made, stall_s=3.0)
    assert made.save_costs_s == (3.0,)


def test_a_failed_save_leaves_nothing_to_the_next() -> None:
    made = meter()
    save(made, 5.0, ok=False)
    assert made.save_costs_s == made.persist_times_s == ()
    save(made, 1.0)
    assert made.save_costs_s == (0.1,)


def test_steps_during_a_save_are_no_step_times() -> None:
    made = meter()
    save(made, 9.0)
    made.step_ended(7.0, is_disturbed=True)
    made.step_ended(1.1, is_disturbed=False)
    assert made.step_times_s == (1.0, 1.2, 0.8, 1.1)


def test_earlier_attempts_count_until_this_one_has_enough() -> None:
    made = meter(5.0, 6.0)
    save(made, 1.0)
    save(made, 1.0)
    assert made.save_costs_s == (5.0, 6.0, 0.1, 0.1)
    save(made, 1.0)
    assert made.save_costs_s == (0.1, 0.1, 0.1)


def test_what_was_long_ago_is_forgotten() -> None:
    made = meter()
    for number in range(500):
        made.step_ended(float(number), is_disturbed=False)
        made.save_began()
        made.save_ended(float(number), 10.0 * number, is_committed=True)
    assert made.step_times_s == tuple(float(number) for number in range(450, 500))
    assert made.save_costs_s == tuple(float(number) for number in range(491, 500))
    assert made.persist_times_s == tuple(10.0 * number for number in range(491, 500))


def test_of_earlier_attempts_the_newest_saves_count() -> None:
    times_s = tuple(float(number) for number in range(100))
    made = SaveCostMeter(SaveHistory(costs_s=times_s, persist_times_s=times_s))
    assert made.save_costs_s == made.persist_times_s == times_s[-9:]
    made.save_began()
    made.save_ended(0.1, 0.2, is_committed=True)
    assert made.save_costs_s == (*times_s[-9:], 0.1)
    assert made.persist_times_s == (*times_s[-8:], 0.2)
