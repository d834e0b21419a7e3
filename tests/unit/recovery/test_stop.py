"""A stop signal is noted and nothing else happens."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from hetero_fw.recovery import StopRequest


@pytest.fixture(autouse=True)
def restored_handlers() -> Iterator[None]:
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_first_signal_is_remembered_and_all_are_counted() -> None:
    stop = StopRequest()
    stop.listen(signal.SIGUSR1, signal.SIGUSR2)
    assert (stop.signal_number, stop.num_received) == (0, 0)
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.signal_number == signal.SIGUSR2
    assert stop.num_received == 2
