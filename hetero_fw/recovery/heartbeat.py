"""Sign of life of each rank: a file's time stamp that a thread keeps fresh."""

from __future__ import annotations

import threading
import time
from pathlib import Path


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
        self._path.parent.mkdir(parents=True, exist_ok=True)
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


def silence_s(path: Path) -> float:
    """Seconds since the last beat; 0 if there has been none yet."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except FileNotFoundError:
        return 0.0
