"""Watch and end processes that need not be children of this one."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path


class Watched:
    """Another process, held by a descriptor that the kernel marks when the process ends.

    A descriptor cannot mean a later process with the same number, as a pid can.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._fd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = None

    def fileno(self) -> int:
        """Descriptor that becomes readable when the process ends."""
        assert self._fd is not None, "the process has ended already"
        return self._fd

    @property
    def has_ended(self) -> bool:
        if self._fd is None:
            return True
        readable, _, _ = select.select([self._fd], [], [], 0)
        return bool(readable)

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if the process has ended."""
        if self._fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def wait_any(watched: list[Watched], extra_fds: list[int], timeout_s: float) -> None:
    """Return when a process of `watched` ends, an extra descriptor is ready, or time is up."""
    poller = select.poll()
    for fd in [item.fileno() for item in watched if not item.has_ended] + extra_fds:
        poller.register(fd, select.POLLIN)
    poller.poll(max(0.0, timeout_s) * 1000)


def kill_all(watched: list[Watched], timeout_s: float) -> list[int]:
    """SIGKILL every process and wait until each has ended; pids that have not are returned.

    SIGKILL also ends a stopped process. What remains sleeps in the kernel, on dead storage say.
    """
    for item in watched:
        item.send(signal.SIGKILL)
    end_s = time.monotonic() + timeout_s
    for item in watched:
        if item.has_ended:
            continue
        wait_any([item], [], end_s - time.monotonic())
    return [item.pid for item in watched if not item.has_ended]


def rank_pid(path: Path) -> int | None:
    """The pid a rank has noted in `path`, None before it has."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    return int(text) if text.endswith("\n") else None
