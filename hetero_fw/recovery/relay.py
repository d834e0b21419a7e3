"""Signals that reach the supervisor, passed on to the ranks of one attempt."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from hetero_fw.recovery.processes import Watched, kill_all
from hetero_fw.recovery.stop import SaveRequest, StopRequest

_KILL_TIMEOUT_S = 10.0


class SignalRelay:
    """Passes each request on once; kills the ranks on a second SIGINT or when their time is up.

    Args:
        grace_s: seconds that ranks have from the first stop signal to their last checkpoint.
    """

    def __init__(self, stop: StopRequest, save: SaveRequest, *, grace_s: float) -> None:
        self._stop = stop
        self._save = save
        self._grace_s = grace_s
        self._num_told = 0

    @property
    def has_stopped(self) -> bool:
        """Whether a stop was asked for."""
        return bool(self._stop.signal_number)

    @property
    def is_grace_over(self) -> bool:
        return self._stop.age_s > self._grace_s

    def forward(self, ranks: Sequence[Watched]) -> None:
        """Pass on what has come; `ranks` are those that run so far, old ones first."""
        if self._stop.is_insisted_on or self.is_grace_over:
            kill_all(list(ranks), _KILL_TIMEOUT_S)
        elif self._stop.signal_number:
            self._forward_stop(ranks)
        else:
            self._forward_save(ranks)

    def _forward_stop(self, ranks: Sequence[Watched]) -> None:
        if len(ranks) == self._num_told:
            return
        # Ranks ignore SIGINT: a terminal sends it to them as well, and to each on its own.
        is_interrupt = self._stop.signal_number == signal.SIGINT
        number = signal.SIGTERM if is_interrupt else signal.Signals(self._stop.signal_number)
        for rank in ranks:
            rank.send(number)
        self._num_told = len(ranks)

    def _forward_save(self, ranks: Sequence[Watched]) -> None:
        """Ask one rank: it asks the others, at a step boundary."""
        number = self._save.pending()
        running = [rank for rank in ranks if not rank.has_ended]
        if number and running:
            self._save.clear()
            running[0].send(signal.Signals(number))
