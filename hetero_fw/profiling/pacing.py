"""Make a CPU process take as long as the device it stands in for would, to scale."""

from __future__ import annotations

import time


class Pacer:
    """Holds each step of one rank until its device would have finished its share.

    A step's window opens when all ranks have met at the end of the step before, so that waiting
    for a slower rank is not taken for work. What a step does besides computing (optimizer,
    logging, loading) lies inside the window, as on a device that is busy throughout. Work that
    the device itself would wait for is taken out with `exclude`.

    Args:
        target_s: time the emulated device needs for its share of one step, in seconds here.
    """

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._opened_s: float | None = None

    @property
    def is_open(self) -> bool:
        return self._opened_s is not None

    def open(self) -> None:
        """Begin a window."""
        self._opened_s = time.perf_counter()

    def load(self) -> float:
        """Share of the target used up so far: above 1 the core was too slow or too busy."""
        assert self._opened_s is not None, "Pacer.open() comes first"
        return (time.perf_counter() - self._opened_s) / self._target_s

    def hold(self, stretch: float) -> float:
        """Sleep until `stretch` times the target has passed and return the time it took.

        Args:
            stretch: at least every rank's `load()`, the same on all ranks, so that relative
                speeds hold when the cores are too busy for the absolute ones.
        """
        assert self._opened_s is not None, "Pacer.open() comes first"
        end_s = self._opened_s + self._target_s * stretch
        while (remaining_s := end_s - time.perf_counter()) > 0:
            time.sleep(remaining_s)
        return time.perf_counter() - self._opened_s

    def exclude(self, seconds: float) -> None:
        """Take time out of the open window: the device stood still for it."""
        if self._opened_s is not None:
            self._opened_s += seconds
