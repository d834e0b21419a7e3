"""A process that touches storage in place of this one, is watched, and is replaced when it ends.

A hung or failing storage then holds up nothing but a save: a process can be killed where a thread
cannot, it shares no interpreter lock with training, and an error in a client library ends it alone.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import multiprocessing.process
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import reduction, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from hetero_fw.checkpoint.executor import Task, no_progress, taking_turn
from hetero_fw.checkpoint.host_memory import HostMemory
from hetero_fw.checkpoint.save_tasks import OnProgress
from hetero_fw.checkpoint.storage import StorageHangs
from hetero_fw.errors import CheckpointError

T = TypeVar("T")

# What `ps` and `top` call the process; at most 15 bytes.
PROCESS_NAME = "hetero-writer"
# Training comes first where both want the same core.
NICENESS = 10
_START_S = 60.0
_KILL_S = 0.5
_PROGRESS_INTERVAL_S = 0.5
_ATTACH, _RUN, _PROGRESS, _RESULT, _ERROR = range(5)


class WriterProcess:
    """An `Executor` whose tasks run in a process of their own.

    Tasks and their results travel as pickles between the two processes, which trust each other;
    nothing of that is ever in a file.

    Args:
        on_start: module-level function that the process calls first, for example to tie its life
            to that of this process.
    """

    def __init__(self, on_start: Callable[[], None] | None = None) -> None:
        self._on_start = on_start
        self._memory: HostMemory | None = None
        self._sent_memory: HostMemory | None = None
        self._process: BaseProcess | None = None
        self._connection: Any = None
        # The thread of a save and the one that looks after the process both start one.
        self._lock = threading.RLock()
        self._is_closed = False
        self._lost: str | None = None
        self._starter = threading.Thread(target=self._start_early, daemon=True)
        self._starter.start()

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return self._process.pid if self._process is not None else None

    def attach(self, memory: HostMemory) -> None:
        # Sent with the next task: the caller must not wait for a process that is starting.
        self._memory = memory

    def run(
        self,
        task: Task[T],
        *,
        deadline_s: float,
        on_progress: OnProgress = no_progress,
        patience_s: float | None = None,
    ) -> T:
        with taking_turn(self._lock, deadline_s, patience_s) as own_deadline_s:
            try:
                self._ensure()
                self._send(task, own_deadline_s)
                result: T = self._receive(own_deadline_s, on_progress, patience_s)
            except (EOFError, ConnectionError) as error:
                raise CheckpointError(self._bury()) from error
        return result

    def check(self) -> str | None:
        """Says once that the process has ended on its own; another one is started at once."""
        if self._lock.acquire(blocking=False):
            try:
                if self._process is not None and self._process.exitcode is not None:
                    self._bury()
                if self._process is None and not self._is_closed and not self._starter.is_alive():
                    self._starter = threading.Thread(target=self._start_early, daemon=True)
                    self._starter.start()
            finally:
                self._lock.release()
        lost, self._lost = self._lost, None
        return lost

    def close(self, timeout_s: float) -> None:
        self._is_closed = True
        self._starter.join(timeout_s)
        # A task that runs holds the lock; the process is ended under it.
        process = self._process
        if process is not None:
            process.kill()
            _forget(process, timeout_s)

    def _send(self, task: Task[Any], deadline_s: float) -> None:
        assert self._process is not None
        # A stopped process takes no message that is larger than the socket's buffer.
        left_s = max(0.0, deadline_s - time.monotonic())
        bound = threading.Timer(left_s, self._process.kill)
        bound.start()
        try:
            self._send_memory()
            self._connection.send((_RUN, task))
        finally:
            bound.cancel()

    def _receive(self, deadline_s: float, on_progress: OnProgress, patience_s: float | None) -> Any:
        while True:
            if not self._connection.poll(max(0.0, deadline_s - time.monotonic())):
                self._end()
                raise StorageHangs
            kind, value = self._connection.recv()
            if kind == _RESULT:
                return value
            if kind == _ERROR:
                raise value
            if patience_s is not None:
                deadline_s = max(deadline_s, time.monotonic() + patience_s)
            on_progress(value)

    def _start_early(self) -> None:
        """Start the process before the first task needs it."""
        with self._lock:
            try:
                self._ensure()
            except (OSError, CheckpointError, EOFError):
                return  # the next task tries again and says why it cannot

    def _ensure(self) -> None:
        if self._is_closed:
            raise CheckpointError("the writer was closed")
        if self._process is not None and self._process.exitcode is None:
            return
        if self._process is not None:
            self._bury()
        context = multiprocessing.get_context("forkserver")
        self._connection, theirs = context.Pipe(duplex=True)
        process = context.Process(
            target=_serve, args=(theirs, self._on_start), name="checkpoint-writer", daemon=True
        )
        try:
            process.start()
        except (OSError, EOFError) as error:  # the fork server is gone, before or meanwhile
            raise CheckpointError(f"the writer's process cannot be started: {error}") from error
        self._process = process
        # It ignores the signal that multiprocessing would end it with, and then wait for. So it has
        # to end before: finalizers with a priority come first.
        util.Finalize(self, _kill, args=(self._process,), exitpriority=10)
        theirs.close()
        if not self._connection.poll(_START_S):
            self._end()
            raise CheckpointError(f"the writer's process did not start within {_START_S:.0f} s")
        self._connection.recv()
        self._sent_memory = None

    def _send_memory(self) -> None:
        """Let the process see the memory that is attached, if it does not yet."""
        memory = self._memory
        if memory is None or memory.fd is None or memory is self._sent_memory:
            return
        assert self._process is not None
        assert self._process.pid is not None
        self._connection.send((_ATTACH, memory.size))
        reduction.send_handle(self._connection, memory.fd, self._process.pid)
        self._sent_memory = memory

    def _bury(self) -> str:
        """Clear up after a process that has ended on its own; returns what became of it."""
        process = self._process
        assert process is not None
        process.join(_KILL_S)
        self._lost = f"the writer's process {process.pid} {_how(process.exitcode)}"
        self._connection.close()
        self._process = None
        return self._lost

    def _end(self) -> None:
        """End a process that hangs. If not even SIGKILL reaches it, it is left to the kernel."""
        process = self._process
        assert process is not None
        process.kill()
        _forget(process, _KILL_S)
        self._lost = f"the writer's process {process.pid} hung in the storage and was killed"
        self._connection.close()
        self._process = None


def _forget(process: BaseProcess, timeout_s: float) -> None:
    """Wait for the end of a killed process; leave one to the kernel that hangs in it.

    Python would wait for that one without a bound when this process exits.
    """
    process.join(timeout_s)
    if process.exitcode is None:
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]


def _kill(process: BaseProcess) -> None:
    if process.exitcode is None:
        process.kill()


def _how(exitcode: int | None) -> str:
    if exitcode is None:
        return "does not answer"
    if exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"ended with status {exitcode}"


def _serve(connection: Connection, on_start: Callable[[], None] | None) -> None:
    """The process: run what it is sent until the other side is gone."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the run, which saves because of them
    if on_start is not None:
        on_start()
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(PROCESS_NAME)
    torch.set_num_threads(1)
    connection.send(None)
    content = memoryview(b"")
    while True:
        try:
            kind, value = connection.recv()
            if kind == _ATTACH:
                content = _map(reduction.recv_handle(connection), value)
            else:
                connection.send(_run(value, content, connection))
        except (EOFError, ConnectionError):
            return


def _map(fd: int, size: int) -> memoryview:
    try:
        return memoryview(mmap.mmap(fd, size))
    finally:
        os.close(fd)


def _run(task: Task[Any], content: memoryview, connection: Connection) -> tuple[int, Any]:
    told_s = time.monotonic()

    def on_progress(num_bytes: int) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if now_s - told_s >= _PROGRESS_INTERVAL_S:
            told_s = now_s
            connection.send((_PROGRESS, num_bytes))

    try:
        return _RESULT, task(content, on_progress)
    except CheckpointError as error:
        return _ERROR, error
    except OSError as error:
        # By its number and text alone: subclasses of client libraries may not survive the trip.
        return _ERROR, OSError(error.errno, error.strerror or str(error), error.filename)
    except Exception as error:  # noqa: BLE001  # becomes the reason of a failed save
        return _ERROR, CheckpointError(f"{type(error).__name__}: {error}")
