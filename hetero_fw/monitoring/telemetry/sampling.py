"""A thread that reads telemetry at an interval and never ends training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from hetero_fw.policies import Reading

_STOP_TIMEOUT_S = 2.0
_T = TypeVar("_T")


@runtime_checkable
class TelemetrySource(Protocol):
    """Something that can be read.

    All calls come from one thread, which is not the one that trains. `read` may block for a moment
    and may raise: the next call comes after the usual interval all the same. `close` comes last,
    once.
    """

    def read(self) -> Reading:
        """The present values; what the device does not tell is left out."""

    def close(self) -> None:
        """Let go of what reading needed."""


class TelemetryThread:
    """Reads `sources` every `interval_s` from a daemon thread.

    Args:
        on_reading: gets what all sources together have read.
        on_error: told about the first error of each source, and no more.
    """

    def __init__(
        self,
        sources: Sequence[TelemetrySource],
        *,
        interval_s: float,
        on_reading: Callable[[Reading], None],
        on_error: Callable[[str], None],
    ) -> None:
        self._sources = tuple(sources)
        self._interval_s = interval_s
        self._on_reading = on_reading
        self._on_error = on_error
        self._has_failed: set[int] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; waits a moment for a reading under way. Harmless when called twice."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        while not self._ended.is_set():
            self.sample()
            self._ended.wait(self._interval_s)
        for source in self._sources:
            self._guarded(source, source.close)

    def sample(self) -> None:
        """Read every source once; those that fail are left out."""
        readings = [self._guarded(source, source.read) for source in self._sources]
        self._on_reading(merge_readings(reading for reading in readings if reading is not None))

    def _guarded(self, source: TelemetrySource, call: Callable[[], _T]) -> _T | None:
        try:
            return call()
        except Exception as error:  # noqa: BLE001  # a broken sensor must not end training
            if id(source) not in self._has_failed:
                self._has_failed.add(id(source))
                kind = type(error).__name__
                self._on_error(f"{type(source).__name__} cannot be read: {kind}: {error}")
        return None


def merge_readings(readings: Iterable[Reading]) -> Reading:
    """One reading with the values of all; of two with the same measure the later counts."""
    found = list(readings)
    return Reading(
        values={measure: value for reading in found for measure, value in reading.values.items()},
        notes={measure: note for reading in found for measure, note in reading.notes.items()},
    )
