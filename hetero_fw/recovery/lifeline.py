"""Tie the life of a process to the life of the one that started it, by the kernel alone."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import select
import signal
import threading

_F_SETSIG = 10  # Linux; not in Python's fcntl module
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel SIGKILL this process as soon as the process that started it is gone.

    Processes made through a fork server have the server as their parent, so PR_SET_PDEATHSIG
    alone does not cover the death of whoever asked for them. The starter holds the write end of
    a pipe whose read end is here; when it dies the pipe breaks, and asynchronous I/O on the pipe
    is set to deliver SIGKILL. This needs no running thread: it also ends a process that is
    stopped, hangs in a library call or holds the interpreter lock.
    """
    _die_with_fork_server()
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    fd = int(parent.sentinel)
    try:
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, _F_SETSIG, int(signal.SIGKILL))
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        # Not every kernel offers this on pipes; a thread covers all but stopped processes.
        threading.Thread(target=_watch, args=(fd,), name="lifeline", daemon=True).start()
    if _is_broken(fd):
        os.kill(os.getpid(), signal.SIGKILL)


def _die_with_fork_server() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _is_broken(fd: int) -> bool:
    readable, _, _ = select.select([fd], [], [], 0)
    return bool(readable)


def _watch(fd: int) -> None:
    select.select([fd], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
