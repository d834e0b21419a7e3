"""Processes that save to an object store and are killed or stopped on the way."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

import psutil
import torch

from hetero_fw.checkpoint import ObjectPlace, SavePoint
from hetero_fw.errors import CheckpointError
from hetero_fw.policies import RetentionRule
from hetero_fw.recovery import die_with_parent
from tests.unit.checkpoint.examples import PREFIX
from tests.unit.checkpoint.object_saves import save_at

START_S = 60.0
KEEP_TWO = RetentionRule(keep_latest_k=2)
# 40 MB and 10 bytes for each row: more than one part.
BIG = 4_000_000


@contextmanager
def saving_process(
    place: ObjectPlace, step: int, *, size: int = 50, signal_at: tuple[str, int] | None = None
) -> Iterator[BaseProcess]:
    """A process that saves `step` and prunes; exit status 3 if the storage refuses.

    Args:
        signal_at: a point, and the signal it sends itself when it first passes that.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "hetero_fw.checkpoint"])
    # The fork server may be older than the login in this process's environment.
    login = {n: v for n, v in os.environ.items() if n.startswith(("AWS_", "STORAGE_"))}
    process = context.Process(target=_save, args=(place, step, size, signal_at, login))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(10.0)


def _save(
    place: ObjectPlace,
    step: int,
    size: int,
    signal_at: tuple[str, int] | None,
    login: dict[str, str],
) -> None:
    die_with_parent()
    os.environ.update(login)
    torch.set_num_threads(1)
    pending = [signal_at] if signal_at is not None else []

    def on_point(point: SavePoint) -> None:
        if pending and point == pending[0][0]:
            os.kill(os.getpid(), pending.pop()[1])

    try:
        save_at(place, step, size=size, on_point=on_point)
        place.prune(PREFIX, KEEP_TWO, on_point=on_point)
    except CheckpointError:
        os._exit(3)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline_s, f"it never came to this: {what}"
        time.sleep(0.01)


def wait_until_stopped(process: BaseProcess) -> None:
    watched = psutil.Process(process.pid)
    wait_for(lambda: watched.status() == psutil.STATUS_STOPPED, "stopped")


def wait_until_killed(process: BaseProcess) -> None:
    process.join(START_S)
    assert process.exitcode == -signal.SIGKILL
