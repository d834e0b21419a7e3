from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetero_fw.policies import AttemptStart, find_departure


def start(attempt: int, start_step: int, *, has_saved: bool = True) -> AttemptStart:
    return AttemptStart(attempt=attempt, start_step=start_step, has_saved=has_saved)


def test_an_attempt_that_went_on_from_before_leaves_a_step_behind() -> None:
    starts = [start(0, 0), start(1, 50)]
    found = find_departure(90, 0, starts)
    assert found is not None
    assert (found.attempt, found.start_step) == (1, 50)
    assert found.reason == "step 90 of attempt 0 is passed over: attempt 1 went on from step 50"
    assert find_departure(50, 0, starts) is None
    assert find_departure(40, 0, starts) is None
    assert find_departure(70, 1, starts) is None


def test_a_fresh_start_leaves_everything_behind() -> None:
    found = find_departure(10, 0, [start(0, 0), start(1, 0)])
    assert found is not None
    assert "attempt 1 began at step 0" in found.reason


def test_an_attempt_that_has_saved_nothing_leaves_nothing_behind() -> None:
    starts = [start(0, 0), start(1, 50, has_saved=False), start(2, 0, has_saved=False)]
    assert find_departure(90, 0, starts) is None


def test_the_departure_from_the_oldest_step_counts() -> None:
    starts = [start(0, 0), start(1, 50), start(2, 60), start(3, 80)]
    of_first, of_second = find_departure(90, 0, starts), find_departure(70, 1, starts)
    assert of_first is not None
    assert of_second is not None
    assert (of_first.attempt, of_second.attempt) == (1, 2)


def test_without_a_record_nothing_is_left_behind() -> None:
    assert find_departure(90, 0, []) is None


def tried(checkpoints: set[tuple[int, int]], starts: list[AttemptStart]) -> list[tuple[int, int]]:
    """(attempt, step) of `checkpoints` in the order in which a search comes to them."""
    order: list[tuple[int, int]] = []
    deferred: list[tuple[int, tuple[int, int]]] = []

    def come_to(step: int) -> None:
        due = [checkpoint for until, checkpoint in deferred if until >= step]
        deferred[:] = [item for item in deferred if item[0] < step]
        order.extend(sorted(due, reverse=True))

    for step in sorted({step for _, step in checkpoints}, reverse=True):
        come_to(step)
        for attempt in sorted((a for a, s in checkpoints if s == step), reverse=True):
            departure = find_departure(step, attempt, starts)
            if departure is None:
                order.append((attempt, step))
            else:
                deferred.append((departure.start_step, (attempt, step)))
    come_to(0)
    return order


@given(st.data())
def test_the_latest_attempt_comes_first_whatever_it_went_on_from(data: st.DataObject) -> None:
    checkpoints: set[tuple[int, int]] = set()
    starts = []
    for attempt in range(data.draw(st.integers(1, 5))):
        known = [0, *(step for _, step in checkpoints)]
        begin = data.draw(st.sampled_from(sorted(known)))
        steps = data.draw(st.sets(st.integers(begin + 1, begin + 6), max_size=4))
        starts.append(start(attempt, begin, has_saved=bool(steps)))
        checkpoints |= {(attempt, step) for step in steps}
    assert tried(checkpoints, starts) == sorted(checkpoints, reverse=True)
