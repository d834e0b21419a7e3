"""Processes that are killed or stopped at a chosen point of a save, and what they leave."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from hetero_fw.checkpoint import (
    AttemptDirectories,
    CheckpointSaver,
    DirectoryPlace,
    SavePoint,
    WriterProcess,
    find_restorable,
    load_checkpoint,
    shard_file,
)
from hetero_fw.parallel import connect_ranks
from hetero_fw.policies import RetentionRule
from hetero_fw.recovery import StoreAddress, die_with_parent, share_fork_server
from hetero_fw.recovery.store import LOOPBACK
from tests.distributed.ranks import PRELOAD
from tests.unit.checkpoint.examples import PREFIX, make_saver, weights

START_S = 60.0
SAVE_TIMEOUT_S = 1.0
KEEP_TWO = RetentionRule(keep_latest_k=2)


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """Send `signal_number` to oneself when `point` is passed for the `nth` time."""

    point: str
    signal_number: int
    nth: int = 1


class _Observer:
    """Sends the signal, in whichever process the point is passed; to `tree_pid` as well."""

    def __init__(
        self, interruption: Interruption, tree_pid: int | None = None, note: Path | None = None
    ) -> None:
        self._interruption = interruption
        self._tree_pid = tree_pid
        self._note = note
        self._num_passed = 0

    def __call__(self, point: SavePoint) -> None:
        self._num_passed += point == self._interruption.point
        if self._num_passed == self._interruption.nth and point == self._interruption.point:
            if self._note is not None:
                self._note.write_text(str(os.getpid()))
            if self._tree_pid not in (None, os.getpid()):
                os.kill(self._tree_pid, self._interruption.signal_number)
            # To this thread: a signal to the process may reach another one first, and this one
            # would run past the point before it stops.
            signal.pthread_kill(threading.get_ident(), self._interruption.signal_number)


def interruption_at(point: SavePoint, signal_number: int) -> Interruption:
    # The second piece, so that the file on the disk is a part of one.
    nth = 2 if point is SavePoint.SHARD_PIECE else 1
    return Interruption(point=point, signal_number=signal_number, nth=nth)


@contextmanager
def saving_process(
    root: Path, step: int, value: int, interruption: Interruption, *, has_writer: bool = False
) -> Iterator[BaseProcess]:
    """A process that saves `weights(value)` as `step` and prunes, until it is interrupted.

    With `has_writer`, what touches storage is in a process of its own, and both are interrupted.
    """
    process = _start(_save_alone, str(root), step, value, asdict(interruption), has_writer)
    try:
        yield process
    finally:
        _end(process)


def _start(function: Any, *arguments: Any) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=function, args=arguments)
    process.start()
    return process


def _end(process: BaseProcess) -> None:
    process.kill()
    process.join(5.0)


def wait_until_stopped(process: BaseProcess, root: Path) -> set[int]:
    """Wait until all is stopped that is about to be; the pids to continue.

    One that is continued before it has stopped itself would stop for good.
    """
    assert process.pid is not None
    _wait_until_stopped(process.pid)
    passed_by = int(note_path(root).read_text())
    _wait_until_stopped(passed_by)
    return {process.pid, passed_by}


def _wait_until_stopped(pid: int) -> None:
    watched = psutil.Process(pid)
    deadline_s = time.monotonic() + START_S
    while (status := watched.status()) != psutil.STATUS_STOPPED:
        assert status != psutil.STATUS_ZOMBIE, "it ended instead of stopping"
        assert time.monotonic() < deadline_s, "it never came to the point"
        time.sleep(0.005)


def result_of(root: Path) -> dict[str, Any]:
    """Outcome and warnings of the process that saved beside `root`."""
    result: dict[str, Any] = json.loads(_result_path(root).read_text())
    return result


def note_path(root: Path) -> Path:
    """Where the process that passed the point has left its pid."""
    return root.with_suffix(".pid")


def _result_path(root: Path) -> Path:
    return root.with_suffix(".result")


def _begin() -> None:
    die_with_parent()
    share_fork_server()
    torch.set_num_threads(1)
    shard_file.PIECE_BYTES = 4096


def _save_alone(
    root: str, step: int, value: int, interruption: dict[str, Any], has_writer: bool
) -> None:
    _begin()
    warnings: list[str] = []
    watcher = logging.Handler()
    watcher.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hetero_fw").addHandler(watcher)
    tree_pid = os.getpid() if has_writer else None
    observer = _Observer(Interruption(**interruption), tree_pid, note_path(Path(root)))
    executor = WriterProcess(_begin) if has_writer else None
    saver = make_saver(
        Path(root),
        retention=KEEP_TWO,
        on_point=observer,
        executor=executor,
        overlaps_staging=has_writer,
    )
    handle = saver.save(step, weights(value), {"step": step}, reason="test")
    assert handle.wait(START_S)
    assert handle.outcome is not None
    result = {"ok": handle.outcome.ok, "reason": handle.outcome.reason, "warnings": warnings}
    _result_path(Path(root)).write_text(json.dumps(result))


def restorable(root: Path) -> tuple[int, int]:
    """The step that would be restored, and the value that its weights have."""
    info = find_restorable(root, PREFIX, lambda path, reason: pytest.fail(reason))
    assert info is not None
    loaded = weights(0)
    load_checkpoint(info.path, loaded)
    value = int(loaded["model.count"])
    assert all(torch.equal(loaded[fqn], tensor) for fqn, tensor in weights(value).items())
    return info.step, value


def contents(root: Path) -> dict[str, bytes | None]:
    """Every path below `root`, with the bytes of the files."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


def save_together(root: Path, victim: int, interruption: Interruption) -> list[dict[str, Any]]:
    """Two ranks save step 1, then step 2, in which `victim` is killed; what the others saw."""
    server = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    processes = [
        _start(_save_as_rank, str(root), rank, server.port, asdict(interruption), rank == victim)
        for rank in range(2)
    ]
    try:
        for process in processes:
            process.join(START_S)
        assert processes[victim].exitcode == -signal.SIGKILL
        survivors = [rank for rank in range(2) if rank != victim]
        return [json.loads((root / f"../{rank}.result").read_text()) for rank in survivors]
    finally:
        for process in processes:
            _end(process)


def _save_as_rank(
    root: str, rank: int, port: int, interruption: dict[str, Any], is_victim: bool
) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    shard_file.PIECE_BYTES = 4096
    store = StoreAddress(host=LOOPBACK, port=port).connect(0, START_S)
    group = connect_ranks(store, rank=rank, world_size=2, backend="gloo", timeout_s=START_S)
    observers = [_Observer(Interruption(**interruption))] if is_victim else []
    armed: list[bool] = []

    def on_point(point: SavePoint) -> None:
        for observer in observers if armed else []:
            observer(point)

    saver = CheckpointSaver(
        place=DirectoryPlace(directories=AttemptDirectories(root=Path(root), attempt=1)),
        attempt=1,
        prefix=PREFIX,
        rank=rank,
        world_size=2,
        store=store,
        process_group=group,
        is_async=True,
        plan_fingerprint="plan",
        on_event=lambda event, step, fields: None,
        timeout_s=SAVE_TIMEOUT_S,
        on_point=on_point,
    )
    first = saver.save(1, weights(1), {}, reason="test")
    assert first.wait(START_S)
    assert first.outcome is not None
    dist.barrier(group)
    armed.append(True)
    began_s = time.monotonic()
    second = saver.save(2, weights(2), {}, reason="test")
    assert second.wait(START_S)
    assert second.outcome is not None
    outcome = {
        "ok": [first.outcome.ok, second.outcome.ok],
        "reason": second.outcome.reason,
        "wait_s": time.monotonic() - began_s,
    }
    (Path(root) / f"../{rank}.result").write_text(json.dumps(outcome))
    os._exit(0)  # leaving the group in an orderly way would take the rank that is dead
