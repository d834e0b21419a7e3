"""Requests to stop or to save: signal handlers that only note the signal."""

from __future__ import annotations

import signal
import time
from types import FrameType

# A terminal and a wrapper such as srun may each deliver the same Ctrl-C.
_SAME_INTERRUPT_S = 1.0


class StopRequest:
    """Remembers the first stop signal; whoever runs the steps asks for it at a step boundary.

    Nothing else happens in the handler: saving or communicating there can deadlock with what the
    signal interrupted (https://github.com/Lightning-AI/pytorch-lightning/issues/21406).

    Attributes:
        signal_number: the first one, 0 if none has come.
        is_insisted_on: a person has given SIGINT again. Batch systems send several signals, and
            the same one to several processes, which asks for nothing more.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self.is_insisted_on = False
        self._received_s = 0.0
        self._interrupted_s: float | None = None

    def listen(self, *signals: signal.Signals) -> None:
        """Install the handler; main thread only."""
        for number in signals:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if not self.signal_number:
            self._received_s = now_s
            self.signal_number = number
        if number == signal.SIGINT:
            if self._interrupted_s is None:
                self._interrupted_s = now_s
            elif now_s - self._interrupted_s > _SAME_INTERRUPT_S:
                self.is_insisted_on = True

    @property
    def age_s(self) -> float:
        """Seconds since the first signal came, 0 if none has."""
        return time.monotonic() - self._received_s if self.signal_number else 0.0


class SaveRequest:
    """Remembers the newest signal that asks for a save; the run goes on after it."""

    def __init__(self) -> None:
        self._number = 0
        self._received_s = 0.0

    def listen(self, *signals: signal.Signals) -> None:
        """Install the handler; main thread only."""
        for number in signals:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received_s = time.monotonic()
        self._number = number

    def pending(self, since_s: float = float("-inf")) -> int:
        """Number of the signal that waits for an answer and came after `since_s`, 0 if none."""
        return self._number if self._received_s > since_s else 0

    def clear(self) -> None:
        """The request is answered."""
        self._number = 0
