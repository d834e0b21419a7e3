"""A rank takes as long as its device would, never less, and longer only where all agree on it."""

from __future__ import annotations

import time

import pytest

from hetero_fw.profiling import Pacer

# A loaded machine wakes a sleeper late, never early: only lower bounds are exact.
LATE_S = 2.0


def test_hold_lasts_to_the_target() -> None:
    pacer = Pacer(0.05)
    assert not pacer.is_open
    pacer.open()
    assert pacer.is_open
    taken_s = pacer.hold(1.0)
    assert 0.05 <= taken_s < LATE_S


def test_work_inside_the_window_counts() -> None:
    pacer = Pacer(0.1)
    pacer.open()
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < 0.06:
        pass
    assert pacer.load() >= 0.6
    assert pacer.hold(1.0) >= 0.1
    assert pacer.load() >= 1.0


def test_late_rank_is_not_held() -> None:
    pacer = Pacer(0.001)
    pacer.open()
    time.sleep(0.02)
    assert pacer.load() >= 20.0
    assert pacer.hold(1.0) >= 0.02


def test_stretch_lengthens_the_window() -> None:
    pacer = Pacer(0.02)
    pacer.open()
    assert pacer.hold(3.0) >= 0.06


def test_excluded_time_is_added_to_the_window() -> None:
    pacer = Pacer(0.03)
    pacer.open()
    began_s = time.perf_counter()
    time.sleep(0.04)
    pacer.exclude(0.04)
    taken_s = pacer.hold(1.0)
    assert time.perf_counter() - began_s >= 0.07
    assert taken_s >= 0.03


def test_exclude_before_the_first_window_is_harmless() -> None:
    Pacer(1.0).exclude(5.0)


def test_hold_before_open_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="open"):
        Pacer(1.0).hold(1.0)
