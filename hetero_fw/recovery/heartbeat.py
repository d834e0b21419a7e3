"""Sign of life of each rank: a file's time stamp that a thread keeps fresh."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

# Longest time between two looks that counts as silence.
_GAP_S = 2.0


class Heartbeat:
    """Touches `path` every `interval_s` from a daemon thread.

    A rank that is stopped, or whose interpreter lock is held for ever, goes silent; a rank that
    merely waits for a slow peer or a long save does not.
    """

    def __init__(self, path: Path, interval_s: float) -> None:
        self._path = path
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        self._path.touch()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; bounded by one interval."""
        self._ended.set()
        self._thread.join(self._interval_s)

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                self._path.touch()
            except OSError:
                # A full or vanished disk must not look like a hung rank's last word: the
                # thread goes on and the next beat may succeed.
                continue


class Silence:
    """How long a rank has given no sign of life, in the time of the process that listens.

    Clocks are not compared and gaps between looks hardly count: a clock that is set, or a run
    that was suspended as a whole, must not look like ranks that hang.

    Args:
        paths: files whose time stamps are signs of life; those that are missing are passed over.
    """

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._stamp: int | None = None
        self._looked_s = time.monotonic()
        self._silent_s = 0.0

    def look(self) -> float:
        """Seconds without a sign of life so far; to be called every second or more often."""
        stamp, now_s = self._newest_stamp(), time.monotonic()
        is_new = stamp != self._stamp
        self._silent_s = 0.0 if is_new else self._silent_s + min(now_s - self._looked_s, _GAP_S)
        self._stamp, self._looked_s = stamp, now_s
        return self._silent_s

    def _newest_stamp(self) -> int | None:
        stamps = []
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):
                stamps.append(path.stat().st_mtime_ns)
        return max(stamps, default=None)
