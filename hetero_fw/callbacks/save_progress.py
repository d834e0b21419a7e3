"""Say how far a long save is, so that a run that waits is not taken for one that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hetero_fw.checkpoint import CheckpointSaver

PROGRESS_INTERVAL_S = 10.0


class SaveProgressLines:
    """A line every few seconds while a save is in flight.

    Args:
        saver: of rank 0, which speaks for all; None: nothing is said.
        announce: shows a line to the user.
    """

    def __init__(self, saver: CheckpointSaver | None, announce: Callable[[str], None]) -> None:
        self._saver = saver
        self._announce = announce
        self._told_s = time.perf_counter()

    def tell(self) -> None:
        """Say how far it is, unless that was said a moment ago."""
        progress = self._saver.progress() if self._saver is not None else None
        now_s = time.perf_counter()
        if progress is None:
            self._told_s = now_s
        elif now_s - self._told_s >= PROGRESS_INTERVAL_S:
            self._told_s = now_s
            share = progress.num_bytes / max(1, progress.size_bytes)
            self._announce(
                f"checkpoint of step {progress.step} to {progress.tier}: {share:.0%} of rank 0's "
                f"{progress.size_bytes / 1e9:.3g} GB written after {progress.taken_s:.0f} s"
            )

    @contextmanager
    def while_waiting(self) -> Iterator[None]:
        """Training stands still: what tells is a thread. Nobody else calls `tell` meanwhile."""
        if self._saver is None:
            yield
            return
        has_ended = threading.Event()

        def keep_telling() -> None:
            while not has_ended.wait(PROGRESS_INTERVAL_S):
                self.tell()

        thread = threading.Thread(target=keep_telling, name="save-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()
