"""What steps take and what saves cost training, as the policy wants to know it."""

from __future__ import annotations

import statistics
from collections import deque

from hetero_fw.callbacks.run_history import SaveHistory

_RECENT_STEPS = 50
_RECENT_SAVES = 9
# As many saves of this attempt tell more than any number before it, whose slowdown nobody logged.
_ENOUGH_SAVES = 3


class SaveCostMeter:
    """Told of every step and every save of one rank to one tier, in order.

    The cost of a save is its stall and what the steps took longer than usual from its start until
    its outcome was known.
    """

    def __init__(self, history: SaveHistory) -> None:
        self._step_times_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._old_costs_s = history.costs_s[-_RECENT_SAVES:]
        self._costs_s: deque[float] = deque(maxlen=_RECENT_SAVES)
        self._persist_times_s = deque(history.persist_times_s, maxlen=_RECENT_SAVES)
        self._slowdown_s = 0.0
        self._is_saving = False

    @property
    def step_times_s(self) -> tuple[float, ...]:
        """Recent steps that nothing disturbed."""
        return tuple(self._step_times_s)

    @property
    def save_costs_s(self) -> tuple[float, ...]:
        """Recent saves, newest last."""
        own = tuple(self._costs_s)
        return own if len(own) >= _ENOUGH_SAVES else (*self._old_costs_s, *own)

    @property
    def persist_times_s(self) -> tuple[float, ...]:
        """Recent saves, newest last."""
        return tuple(self._persist_times_s)

    def step_ended(self, taken_s: float, *, is_disturbed: bool) -> None:
        """A step took `taken_s`, without saves and validation that it stood still for.

        Args:
            taken_s: its time.
            is_disturbed: the time says nothing about other steps.
        """
        if self._is_saving:
            if self._step_times_s:
                # Of both signs: steps vary, and only the sum is slowdown.
                self._slowdown_s += taken_s - statistics.median(self._step_times_s)
        elif not is_disturbed:
            self._step_times_s.append(taken_s)

    def save_began(self) -> None:
        """Steps from here on may be slower."""
        self._is_saving = True
        self._slowdown_s = 0.0

    def save_ended(self, stall_s: float, persist_s: float, *, is_committed: bool) -> None:
        """The outcome of the save that began last; one that failed says nothing about costs."""
        if is_committed:
            self._costs_s.append(stall_s + max(0.0, self._slowdown_s))
            self._persist_times_s.append(persist_s)
        self._is_saving = False
        self._slowdown_s = 0.0
