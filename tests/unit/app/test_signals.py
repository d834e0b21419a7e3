from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from hetero_fw.app.signals import ignore_for_now, ignore_others

NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    before = {number: signal.signal(number, lambda *_: None) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def ends_like(number: signal.Signals) -> signal.Handlers | None:
    handler = signal.getsignal(number)
    return handler if isinstance(handler, signal.Handlers) else None


def test_what_nobody_listens_for_is_as_it_would_be_by_default_or_ignored() -> None:
    ignore_others("SIGUSR1")
    assert ends_like(signal.SIGUSR1) is None
    assert ends_like(signal.SIGUSR2) is signal.SIG_IGN
    assert ends_like(signal.SIGTERM) is signal.SIG_DFL


def test_what_somebody_listens_for_is_left_to_him() -> None:
    ignore_others("SIGTERM", "SIGUSR1", "SIGUSR2")
    assert [ends_like(number) for number in NUMBERS] == [None, None, None]


def test_signals_can_be_passed_over_for_a_while() -> None:
    ignore_for_now("SIGUSR1")
    assert ends_like(signal.SIGUSR1) is signal.SIG_IGN
    assert ends_like(signal.SIGUSR2) is None
