"""Requests to stop: a signal handler that only notes the signal."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """Remembers the first stop signal; whoever runs the steps asks for it at a step boundary.

    Nothing else happens in the handler: saving or communicating there can deadlock with what the
    signal interrupted (https://github.com/Lightning-AI/pytorch-lightning/issues/21406).
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self.num_received = 0

    def listen(self, *signals: signal.Signals) -> None:
        """Install the handler; main thread only."""
        for number in signals:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.num_received += 1
        self.signal_number = self.signal_number or number
