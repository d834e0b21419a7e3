"""A stop signal is noted and nothing else happens."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from hetero_fw.recovery import StopRequest


@pytest.fixture(autouse=True)
def restored_handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_the_first_signal_is_remembered() -> None:
    stop = StopRequest()
    stop.listen(signal.SIGUSR1, signal.SIGUSR2)
    assert stop.signal_number == 0
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.signal_number == signal.SIGUSR2


@pytest.mark.parametrize(
    ("numbers", "apart_s", "is_insisted_on"),
    [
        ([signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR2], 2.0, False),
        ([signal.SIGINT, signal.SIGUSR1], 2.0, False),
        ([signal.SIGUSR1, signal.SIGINT], 2.0, False),
        ([signal.SIGINT, signal.SIGINT], 0.5, False),
        ([signal.SIGINT, signal.SIGINT], 2.0, True),
        ([signal.SIGUSR1, signal.SIGINT, signal.SIGINT, signal.SIGINT], 0.6, True),
    ],
)
def test_only_an_interrupt_given_again_insists(
    monkeypatch: pytest.MonkeyPatch,
    numbers: list[signal.Signals],
    apart_s: float,
    *,
    is_insisted_on: bool,
) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    stop = StopRequest()
    stop.listen(*numbers)
    for number in numbers:
        assert not stop.is_insisted_on
        now_s += apart_s
        os.kill(os.getpid(), number)
    assert stop.is_insisted_on == is_insisted_on
