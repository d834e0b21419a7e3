"""What is done so that a save that found no room may succeed, and what is not."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from hetero_fw.checkpoint import (
    DirectoryPlace,
    SavePoint,
    list_checkpoints,
    shard_file,
)
from hetero_fw.checkpoint.executor import ThreadExecutor
from hetero_fw.checkpoint.manifest import MANIFEST_NAME
from hetero_fw.checkpoint.object_store import ObjectStore
from hetero_fw.checkpoint.place import Place
from hetero_fw.checkpoint.remedy import Remedy
from hetero_fw.checkpoint.retirement import Retirement
from hetero_fw.checkpoint.save_handle import SaveHandle
from hetero_fw.checkpoint.save_job import SaveJob
from hetero_fw.checkpoint.save_point import OnPoint, pass_by
from hetero_fw.checkpoint.save_tasks import Prune
from hetero_fw.checkpoint.shard_layout import agree_on_layout
from hetero_fw.checkpoint.storage import StorageError
from hetero_fw.checkpoint.unsettled import UnsettledSaves
from hetero_fw.checkpoint.verdict import VerdictBoard
from hetero_fw.checkpoint.writer import VERDICT_GRACE
from hetero_fw.policies import RetentionRule, decide_retention
from tests.small_disk import small_disk
from tests.unit.checkpoint.examples import (
    PREFIX,
    WAIT_S,
    Events,
    claimed,
    fill,
    in_directory,
    in_memory,
    make_saver,
    save,
    spec_of,
    weights,
)

MIB = 2**20
SIZE = 300_000  # of weights that take 5.15 MiB
FULL = "rank 1: the storage is full, 5 B are needed, 0 B are free"
KEEP_THREE = RetentionRule(keep_latest_k=3)


class Remedies:
    """Three checkpoints and what may be done where a fourth finds no room."""

    def __init__(self, root: Path, timeout_s: float = WAIT_S) -> None:
        fill(root, [1, 2, 3])
        self.root = root
        self.timeout_s = timeout_s
        place = DirectoryPlace(directories=claimed(root, 2))
        board = VerdictBoard(None, rank=0, world_size=1)
        executor = ThreadExecutor()
        self.retirement = Retirement(
            place=place,
            prefix=PREFIX,
            executor=executor,
            rule=KEEP_THREE,
            timeout_s=timeout_s,
            counts_unread=False,
        )
        self.remedy = Remedy(
            place=place,
            executor=executor,
            retirement=self.retirement,
            unsettled=UnsettledSaves(place=place, board=board, executor=executor),
            timeout_s=timeout_s,
            clear_up_s=timeout_s / 5,
        )

    def job(self, *, age: float = 0.0, on_point: OnPoint = pass_by) -> SaveJob:
        """A save of step 4; `age` is the part of its time that has passed."""
        staged_at_s = time.monotonic() - age * self.timeout_s
        return SaveJob(
            handle=SaveHandle(4),
            sequence=4,
            spec=spec_of(4, attempt=2, on_point=on_point),
            layout=agree_on_layout(weights(4), rank=0, world_size=1, process_group=None),
            may_be_infinite=None,
            started_at_s=staged_at_s,
            staged_at_s=staged_at_s,
        )

    @property
    def left(self) -> list[int]:
        return [info.step for info in list_checkpoints(self.root, PREFIX)]


def test_room_is_made_for_the_save_that_lacks_it(tmp_path: Path) -> None:
    remedies = Remedies(tmp_path)
    job = remedies.job()
    assert remedies.remedy.lets_try_again(job, FULL)
    assert remedies.left == [3, 2]
    # If it fails again, no second one goes for it.
    assert "hetero_ckpt-step-00000001 was deleted" in remedies.remedy.for_the_next(job, FULL)
    assert remedies.left == [3, 2]


@pytest.mark.parametrize("reason", ["rank 0: permission denied", "rank 0: fenced by attempt 3"])
def test_room_helps_against_nothing_else(tmp_path: Path, reason: str) -> None:
    remedies = Remedies(tmp_path)
    assert not remedies.remedy.lets_try_again(remedies.job(), reason)
    assert remedies.remedy.for_the_next(remedies.job(), reason) == ""
    assert remedies.left == [3, 2, 1]


def test_the_last_two_stay_whatever_lacks_room(tmp_path: Path) -> None:
    remedies = Remedies(tmp_path)
    assert remedies.remedy.lets_try_again(remedies.job(), FULL)
    # What has gone before this save was written is no room for it.
    assert not remedies.remedy.lets_try_again(remedies.job(), FULL)
    assert remedies.left == [3, 2]


def test_no_second_try_begins_late(tmp_path: Path) -> None:
    """It would end as a write that is given up, with all ranks waiting for it."""
    remedies = Remedies(tmp_path)
    job = remedies.job(age=0.6)
    assert not remedies.remedy.lets_try_again(job, FULL)
    assert remedies.left == [3, 2, 1]
    assert "was deleted to make room" in remedies.remedy.for_the_next(job, FULL)


@pytest.mark.parametrize(("takes_s", "hangs"), [(1.2, False), (20.0, True)])
def test_the_other_ranks_wait_no_longer_than_for_a_verdict(
    tmp_path: Path, takes_s: float, hangs: bool
) -> None:
    remedies = Remedies(tmp_path, timeout_s=2.0)
    began_s, ends = time.monotonic(), threading.Event()

    def slow(point: SavePoint) -> None:
        if point is SavePoint.RETIRING:
            ends.wait(takes_s)

    job = remedies.job(age=0.2, on_point=slow)
    assert not remedies.remedy.lets_try_again(job, FULL)
    assert time.monotonic() - began_s < (VERDICT_GRACE - 0.2) * remedies.timeout_s
    assert job.storage_hangs is hangs
    ends.set()


@pytest.mark.parametrize("has_deleted", [False, True])
def test_a_save_that_was_given_up_is_not_tried_again(tmp_path: Path, has_deleted: bool) -> None:
    remedies = Remedies(tmp_path)
    job = remedies.job()
    if has_deleted:
        assert remedies.retirement.make_room(pass_by)
    remedies.retirement.stop()
    left = remedies.left
    assert not remedies.remedy.lets_try_again(job, FULL)
    assert remedies.left == left


class HoldsPruning(ThreadExecutor):
    """What a save has made superfluous goes no sooner than `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = False
        self.gate = threading.Event()

    @override
    def run(self, task: Any, **options: Any) -> Any:
        if isinstance(task, Prune) and task.decide is decide_retention and self.holds:
            assert self.gate.wait(WAIT_S)
        return super().run(task, **options)


@pytest.mark.parametrize(("num_mib", "keep"), [(17, 2), (23, 3)])
def test_a_save_has_the_room_of_what_is_on_its_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_mib: int, keep: int
) -> None:
    """The save before has replaced it, and it goes while this one is being written."""
    monkeypatch.setattr(shard_file, "PIECE_BYTES", MIB // 2)
    executor = HoldsPruning()
    events: Events = []

    def during_write(point: SavePoint) -> None:
        if point is SavePoint.SHARD_PIECE and writes_last.is_set():
            executor.gate.set()
            time.sleep(0.05)

    writes_last = threading.Event()
    with small_disk(tmp_path / "disk", num_mib * MIB) as disk:
        root = disk / "checkpoints"
        rule = RetentionRule(keep_latest_k=keep)
        saver = make_saver(root, events, retention=rule, executor=executor, on_point=during_write)
        for step in range(1, keep + 1):
            assert save(saver, step, weights(step, SIZE)).ok
        executor.holds = True
        replacing = saver.save(keep + 1, weights(keep + 1, SIZE), {}, reason="test")
        assert replacing.wait_for_verdict(WAIT_S)
        writes_last.set()
        last = saver.save(keep + 2, weights(keep + 2, SIZE), {}, reason="test")
        assert last.wait(WAIT_S)
        assert last.outcome is not None
        assert last.outcome.ok, last.outcome.reason
        assert replacing.wait(WAIT_S)
        for step in (7, 8, 9):  # as many are kept as before
            assert save(saver, step, weights(step, SIZE)).ok
        left = [info.step for info in list_checkpoints(root, PREFIX)]
        assert left == [9, 8, 7][:keep]
    assert "checkpoint_failed" not in [event for event, _, _ in events]


def test_what_a_second_try_leaves_is_in_no_later_saves_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was given up while it wrote, so that its part stays until the storage is well again."""
    monkeypatch.setattr(shard_file, "PIECE_BYTES", MIB // 2)
    events: Events = []
    is_slow = threading.Event()

    def slow(point: SavePoint) -> None:
        if point is SavePoint.SHARD_PIECE and is_slow.is_set():
            time.sleep(0.25)

    with small_disk(tmp_path / "disk", 17 * MIB) as disk:
        root = disk / "checkpoints"
        saver = make_saver(root, events, retention=KEEP_THREE, timeout_s=3.0, on_point=slow)
        for step in (1, 2, 3):
            assert save(saver, step, weights(step, SIZE)).ok
        is_slow.set()
        late = save(saver, 4, weights(4, SIZE))
        is_slow.clear()
        assert (late.ok, late.reason) == (False, "rank 0: the storage did not answer in time")
        for step in (5, 6, 7):
            outcome = save(saver, step, weights(step, SIZE))
            assert outcome.ok, outcome.reason
        assert [info.step for info in list_checkpoints(root, PREFIX)] == [7, 6]
        assert list((root / ".staging-1").iterdir()) == []
    (failure,) = [fields["message"] for event, _, fields in events if event == "checkpoint_failed"]
    assert "step-00000001 was deleted to make room" in failure


class FullOnce:
    """The storage is full when `point` is first passed while this is armed."""

    def __init__(self, point: SavePoint) -> None:
        self._point, self.is_armed = point, False

    def __call__(self, point: SavePoint) -> None:
        if point is self._point and self.is_armed:
            self.is_armed = False
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("place", [in_directory, in_memory])
@pytest.mark.parametrize("point", [SavePoint.SHARD_PIECE, SavePoint.WRITING_MANIFEST])
def test_a_save_that_lacked_room_is_committed_once(
    tmp_path: Path, point: SavePoint, place: Callable[[Path], Place], is_async: bool
) -> None:
    events: Events = []
    full = FullOnce(point)
    saver = make_saver(
        tmp_path,
        events,
        place=place(tmp_path),
        retention=KEEP_THREE,
        is_async=is_async,
        on_point=full,
    )
    for step in (1, 2, 3, 4, 5):
        full.is_armed = step == 4
        assert save(saver, step, weights(step)).ok
    committed = [step for event, step, _ in events if event == "checkpoint_committed"]
    assert committed == [1, 2, 3, 4, 5]
    assert "checkpoint_failed" not in [event for event, _, _ in events]
    assert list(tmp_path.glob(".staging-1/*")) == []


def test_what_may_be_published_unheard_is_none_of_those_that_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest's request succeeds unheard; the next one finds the quota exceeded."""
    place = in_memory(tmp_path)
    real_put, puts = ObjectStore.put, []

    def put(store: ObjectStore, key: str, content: bytes) -> None:
        if "step-00000004" in key and key.endswith(MANIFEST_NAME):
            puts.append(key)
            if len(puts) > 1:
                raise OSError(errno.EDQUOT, "Disk quota exceeded")
            real_put(store, key, content)
            raise StorageError("connection reset by peer", is_transient=True)
        real_put(store, key, content)

    saver = make_saver(tmp_path, place=place, retention=KEEP_THREE)
    for step in (2, 3):
        assert save(saver, step, weights(step)).ok
    monkeypatch.setattr(ObjectStore, "put", put)
    assert not save(saver, 4, weights(4)).ok
    assert len(puts) > 1
    assert [info.step for info in list_checkpoints(place.root, PREFIX)] == [3, 2]
