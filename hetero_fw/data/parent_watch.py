"""Loader workers leave with the rank that started them, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from types import FrameType


def leave_with_parent(worker_id: int) -> None:
    """End this worker as soon as its rank is gone. Runs in each worker, as `worker_init_fn`.

    torch's workers look whether their parent process id changes. Under forkserver that parent is
    the fork server, which in turn lives as long as any of its children: after SIGKILL of the rank
    both would wait for each other for ever. The sentinel belongs to the rank itself.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError(f"loader worker {worker_id} has no parent process to watch")
    # A batch system signals every process of a job; torch's workers would exit on SIGTERM, and the
    # rank fail for want of data while it finishes its step and saves.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _pass_over)
    threading.Thread(
        target=_exit_after, args=(parent.sentinel,), name="parent-watch", daemon=True
    ).start()


def end_workers_at_exit() -> None:
    """Let this process end its loader workers by SIGKILL when it exits: they pass over SIGTERM."""
    Finalize(None, _kill_daemons, exitpriority=0)


def _kill_daemons() -> None:
    # multiprocessing ends daemonic children itself right after this, and waits for them.
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def _pass_over(number: int, frame: FrameType | None) -> None:
    """Stands for SIG_IGN, which programs that a dataset runs would inherit."""


def _exit_after(sentinel: int) -> None:
    wait([sentinel])
    # The rank is gone: nobody reads what an orderly exit would flush, and it could block.
    os._exit(1)
