"""One fork server for all processes of a run: the supervisor's, which has everything imported."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def start_fork_server(preload: Sequence[str]) -> None:
    """Start the run's fork server; it and its processes ignore stop signals until they listen.

    A batch system signals every process of a job. What ends the fork server ends all ranks, also
    those that still save. Main thread only; a signal that comes meanwhile is lost.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
    with _ignored(*_STOP_SIGNALS):
        multiprocessing.forkserver.ensure_running()
    atexit.unregister(_end_fork_server)
    atexit.register(_end_fork_server)


def _end_fork_server() -> None:
    """Spare the server the seconds that an interpreter full of modules takes to shut down."""
    server: Any = multiprocessing.forkserver._forkserver
    if server._forkserver_pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)


def share_fork_server() -> None:
    """Have this process start others from the fork server that it came from itself.

    Such a process holds the server's address, but `ensure_running` starts a second, empty server
    all the same, because it is not the parent of the first (CPython 3.11).
    """
    server: Any = multiprocessing.forkserver._forkserver
    if server._forkserver_address is not None and server._forkserver_pid is None:
        server.ensure_running = multiprocessing.resource_tracker.ensure_running


@contextlib.contextmanager
def _ignored(*signals: signal.Signals) -> Iterator[None]:
    """Ignore signals for a moment: processes started in it ignore them for life."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
