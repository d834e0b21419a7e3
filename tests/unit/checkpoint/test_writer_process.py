"""The process that writes: it can be killed, stopped or hang, and costs one save at most."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from hetero_fw.checkpoint import (
    CheckpointSaver,
    SavePoint,
    WriterProcess,
    list_checkpoints,
    load_checkpoint,
    verify_checkpoint,
)
from hetero_fw.policies import RetentionRule
from tests.distributed.ranks import PRELOAD
from tests.unit.checkpoint.examples import PREFIX, WAIT_S, Events, make_saver, save, weights


class At:
    """Sends a signal to the process that passes a point, once for all processes together."""

    def __init__(self, point: SavePoint, signal_number: int, mark: Path) -> None:
        self._point, self._signal_number, self._mark = point, signal_number, mark

    def __call__(self, point: SavePoint) -> None:
        if point == self._point and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), self._signal_number)


@pytest.fixture
def process() -> Iterator[WriterProcess]:
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    process = WriterProcess()
    yield process
    pid = process.pid
    process.close(WAIT_S)
    assert pid is None or not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


def in_process(
    root: Path, process: WriterProcess, events: Events, **options: object
) -> CheckpointSaver:
    return make_saver(root, events, executor=process, **options)


def wait_for(is_so: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def content_of(path: Path) -> torch.Tensor:
    loaded = weights(0)
    load_checkpoint(path, loaded)
    return loaded["model.weight"]


def restarts(events: Events) -> list[str]:
    return [fields["reason"] for event, _, fields in events if event == "writer_restart"]


def test_saves_in_a_process_read_back_and_are_pruned(
    tmp_path: Path, process: WriterProcess
) -> None:
    events: Events = []
    saver = in_process(tmp_path, process, events, retention=RetentionRule(keep_latest_k=2))
    for step in (1, 2, 3):
        assert save(saver, step, weights(step)).ok
    assert save(saver, 4, weights(4, size=7)).ok  # another structure, other memory
    assert [info.step for info in list_checkpoints(tmp_path, PREFIX)] == [4, 3]
    for info in list_checkpoints(tmp_path, PREFIX):
        verify_checkpoint(info)
    assert torch.equal(
        content_of(tmp_path / "hetero_ckpt-step-00000003"), weights(3)["model.weight"]
    )
    assert process.pid != os.getpid()
    assert not restarts(events)


def test_a_writer_killed_between_saves_is_reported_and_replaced(
    tmp_path: Path, process: WriterProcess
) -> None:
    events: Events = []
    saver = in_process(tmp_path, process, events)
    assert save(saver, 1, weights(1)).ok
    first = process.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)

    def is_reported() -> bool:
        saver.poll()
        return bool(restarts(events))

    wait_for(is_reported)
    reason = f"the writer's process {first} was killed by SIGKILL"
    assert restarts(events) == [reason]
    assert events[-1][2]["message"] == f"{reason}; step 1 is safe, a restart goes on from it"
    assert save(saver, 2, weights(2)).ok
    assert process.pid != first
    assert len(restarts(events)) == 1


@pytest.mark.parametrize("point", [SavePoint.SHARD_PIECE, SavePoint.PUBLISHING])
def test_a_writer_killed_during_a_save_costs_that_save(
    tmp_path: Path, process: WriterProcess, point: SavePoint
) -> None:
    events: Events = []
    at = At(point, signal.SIGKILL, tmp_path / "mark")
    saver = in_process(tmp_path / "root", process, events, on_point=at)
    outcome = save(saver, 1, weights(1))
    assert not outcome.ok
    assert "killed by SIGKILL" in outcome.reason
    saver.poll()
    assert len(restarts(events)) == 1
    assert save(saver, 1, weights(1)).ok
    assert list(saver._storage._place.directories.staging.iterdir()) == []


def test_a_stopped_writer_is_given_up_in_time(tmp_path: Path, process: WriterProcess) -> None:
    events: Events = []
    at = At(SavePoint.SHARD_WRITTEN, signal.SIGSTOP, tmp_path / "mark")
    saver = in_process(tmp_path / "root", process, events, on_point=at, timeout_s=2.0)
    began_s = time.monotonic()
    outcome = save(saver, 1, weights(1))
    assert time.monotonic() - began_s < 15.0  # the process starts in it, too
    assert not outcome.ok
    assert "did not answer in time" in outcome.reason
    saver.poll()
    assert "hung in the storage and was killed" in restarts(events)[0]
    assert save(saver, 2, weights(2)).ok


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_writer_that_dies_while_it_starts_costs_that_save(tmp_path: Path) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    process = WriterProcess(die)
    events: Events = []
    saver = in_process(tmp_path, process, events)
    outcome = save(saver, 1, weights(1))
    assert not outcome.ok
    assert "killed by SIGKILL" in outcome.reason
    (failed,) = [fields for event, _, fields in events if event == "checkpoint_failed"]
    assert failed["message"].endswith("no checkpoint is safe yet, a restart begins at step 0")
    assert saver.close(WAIT_S)


def test_a_failed_save_says_what_is_safe(tmp_path: Path, process: WriterProcess) -> None:
    events: Events = []
    saver = in_process(tmp_path, process, events)
    bad = weights(1)
    bad["model.weight"][0] = float("nan")
    assert not save(saver, 1, bad).ok
    assert save(saver, 2, weights(2)).ok
    assert not save(saver, 3, bad).ok
    told = [fields for event, _, fields in events if event == "checkpoint_failed"]
    assert [fields["safe_step"] for fields in told] == [None, 2]
    assert told[0]["message"].endswith("no checkpoint is safe yet, a restart begins at step 0")
    assert told[1]["message"].endswith("step 2 is safe, a restart goes on from it")


def test_staging_beside_the_next_step_ends_before_the_weights_change(
    tmp_path: Path, process: WriterProcess
) -> None:
    saver = in_process(tmp_path, process, [], overlaps_staging=True)
    for step in range(1, 6):
        tensors = weights(step, size=300_000)
        handle = saver.save(step, tensors, {}, reason="test", changing={"model.count"})
        tensors["model.count"].fill_(99)
        saver.finish_staging()
        for tensor in tensors.values():
            tensor.fill_(77)
        assert handle.wait(WAIT_S)
        assert handle.outcome is not None
        assert handle.outcome.path is not None, handle.outcome.reason
        loaded = weights(0, size=300_000)
        load_checkpoint(handle.outcome.path, loaded)
        assert all(torch.equal(loaded[name], t) for name, t in weights(step, 300_000).items())


def test_no_process_is_left_when_a_saver_is_forgotten(tmp_path: Path) -> None:
    process = WriterProcess()
    saver = in_process(tmp_path, process, [])
    assert save(saver, 1, weights(1)).ok
    pid = process.pid
    assert pid is not None
    saver.close(WAIT_S)
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")
