"""Run work that touches storage, each piece with a deadline: in threads of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from hetero_fw.checkpoint.host_memory import HostMemory
from hetero_fw.checkpoint.save_tasks import OnProgress
from hetero_fw.checkpoint.storage import StorageHangs

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Task(Protocol[T_co]):
    """Work on the bytes that are staged; it says how many of them are done."""

    def __call__(self, content: memoryview, on_progress: OnProgress) -> T_co:
        """Do it. Raises what it likes."""


def no_progress(num_bytes: int) -> None:
    """Whoever does not want to know."""


class Executor(Protocol):
    """Where tasks run, one at a time; a thread that comes meanwhile waits for its turn."""

    def attach(self, memory: HostMemory) -> None:
        """Tasks from here on see the bytes of `memory`."""

    def run(
        self,
        task: Task[T],
        *,
        deadline_s: float,
        on_progress: OnProgress = no_progress,
        patience_s: float | None = None,
    ) -> T:
        """Do the task and return its result.

        Args:
            task: the work.
            deadline_s: when to give up, by the monotonic clock.
            on_progress: told the bytes that are done, in the caller's thread or another. What the
                task calls instead raises once the deadline is over.
            patience_s: longest time without progress; with every progress the deadline is that far
                away again. None: the deadline stays.

        Raises:
            StorageHangs: it did not end in time.
            CheckpointError: whatever ran it is gone.
            Exception: what the task raised.
        """

    def check(self) -> str | None:
        """What has gone wrong with the executor itself since the last call, and was mended."""

    def close(self, timeout_s: float) -> None:
        """End what runs tasks. Bounded; nothing is run after it."""


@contextmanager
def taking_turn(
    turn: threading.Lock | threading.RLock, deadline_s: float, patience_s: float | None
) -> Iterator[float]:
    """Hold `turn`, which has to be free by `deadline_s`; the deadline of what is done in it.

    Where there is patience, what it waited for its turn says nothing of the storage.

    Raises:
        StorageHangs: it was not free.
    """
    if not turn.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
        raise StorageHangs("the storage still holds an earlier task")
    try:
        yield max(deadline_s, time.monotonic() + (patience_s or 0.0))
    finally:
        turn.release()


class ThreadExecutor:
    """Runs every task in a thread of its own, which is left behind if it does not end in time.

    A thread cannot be ended. While one hangs in the storage no other is started, so that there is
    never more than one of them.
    """

    def __init__(self) -> None:
        self._memory: HostMemory | None = None
        self._stuck: threading.Thread | None = None
        self._turn = threading.Lock()

    def attach(self, memory: HostMemory) -> None:
        self._memory = memory

    def run(
        self,
        task: Task[T],
        *,
        deadline_s: float,
        on_progress: OnProgress = no_progress,
        patience_s: float | None = None,
    ) -> T:
        with taking_turn(self._turn, deadline_s, patience_s) as own_deadline_s:
            return self._run(task, own_deadline_s, on_progress, patience_s)

    def _run(
        self, task: Task[T], deadline_s: float, on_progress: OnProgress, patience_s: float | None
    ) -> T:
        self._await_stuck(deadline_s)
        content = self._memory.content if self._memory is not None else memoryview(b"")
        ended: list[tuple[Any, Exception | None]] = []
        is_given_up = threading.Event()

        def tell(num_bytes: int) -> None:
            nonlocal deadline_s
            if is_given_up.is_set():
                raise StorageHangs("it was given up")  # what hung must not go on later
            if patience_s is not None:
                deadline_s = max(deadline_s, time.monotonic() + patience_s)
            on_progress(num_bytes)

        def work() -> None:
            try:
                ended.append((task(content, tell), None))
            except Exception as error:  # noqa: BLE001  # handed to the caller
                ended.append((None, error))

        thread = threading.Thread(target=work, name="checkpoint-storage", daemon=True)
        thread.start()
        while thread.is_alive() and (left_s := deadline_s - time.monotonic()) > 0:
            thread.join(left_s)
        if not ended:
            is_given_up.set()
            self._stuck = thread
            raise StorageHangs
        result, error = ended[0]
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def _await_stuck(self, deadline_s: float) -> None:
        if self._stuck is not None:
            self._stuck.join(max(0.0, deadline_s - time.monotonic()))
            if self._stuck.is_alive():
                raise StorageHangs("the storage still holds an earlier write")

    def check(self) -> str | None:
        return None

    def close(self, timeout_s: float) -> None:
        if self._stuck is not None:
            self._stuck.join(timeout_s)
