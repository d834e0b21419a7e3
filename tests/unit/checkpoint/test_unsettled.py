"""What becomes of a save whose end a rank does not see."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from hetero_fw.checkpoint import (
    DirectoryPlace,
    SavePoint,
    WriterProcess,
    read_manifest,
)
from hetero_fw.checkpoint.commit import SaveSpec
from hetero_fw.checkpoint.executor import ThreadExecutor
from hetero_fw.checkpoint.host_memory import HostMemory
from hetero_fw.checkpoint.place import Place
from hetero_fw.checkpoint.save_handle import SaveHandle
from hetero_fw.checkpoint.save_job import SafeStep, SaveJob
from hetero_fw.checkpoint.save_point import OnPoint, pass_by
from hetero_fw.checkpoint.shard_layout import agree_on_layout
from hetero_fw.checkpoint.verdict import ShardReport, Verdict, VerdictBoard, again
from hetero_fw.checkpoint.writer import TierWriter
from hetero_fw.policies import Tier
from tests.distributed.ranks import PRELOAD
from tests.unit.checkpoint.examples import (
    PREFIX,
    WAIT_S,
    claimed,
    in_directory,
    in_memory,
    make_saver,
    published,
    save,
    spec_of,
    weights,
)
from tests.unit.checkpoint.object_saves import shard_of
from tests.unit.checkpoint.test_writer_process import At, wait_for

COMMITTED = Verdict(is_committed=True, reason="test")
FAILED = Verdict(is_committed=False, reason="rank 0: the disk is full")
AGAIN = replace(FAILED, is_again=True)


class OtherRank:
    """Rank 1 of 2, which writes its shard and waits for a rank 0 that the test plays."""

    def __init__(self, place: Place, timeout_s: float) -> None:
        self.place = place
        store = self._store = HashStore()
        self._board = VerdictBoard(store, rank=0, world_size=2)
        executor = ThreadExecutor()
        own, content = shard_of(weights(1))
        self._layout = agree_on_layout(weights(1), rank=0, world_size=1, process_group=None)
        memory = HostMemory(own.size, is_shared=False, is_pinned=False)
        memory.tensor.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        executor.attach(memory)
        self._writer = TierWriter(
            tier=Tier.STORAGE,
            rank=1,
            prefix=PREFIX,
            place=place,
            board=VerdictBoard(store, rank=1, world_size=2),
            executor=executor,
            on_event=lambda event, step, fields: None,
            timeout_s=timeout_s,
            retention=None,
            safe=SafeStep(None),
        )

    def save(self, step: int, *verdicts: Verdict, on_point: OnPoint = pass_by) -> SaveSpec:
        """A save whose tries end with these verdicts, the last with none in time if it has none."""
        spec = spec_of(step, token=uuid.uuid4().hex[:12], world_size=2, on_point=on_point)
        job = SaveJob(
            handle=SaveHandle(step),
            sequence=step,
            spec=spec,
            layout=self._layout,
            may_be_infinite=None,
            started_at_s=time.monotonic(),
            staged_at_s=time.monotonic(),
        )
        self.tell(spec, *verdicts)
        outcome = self._writer.run(job, is_foreground=False)
        assert outcome.ok == (COMMITTED in verdicts)
        return spec

    def tell(self, spec: SaveSpec, *verdicts: Verdict) -> None:
        """What becomes of one try after the other."""
        for name, verdict in zip((spec.token, again(spec.token)), verdicts, strict=False):
            self._board.announce(name, verdict, sequence=spec.step)

    def reports(self, spec: SaveSpec) -> list[ShardReport]:
        """What this rank has said in one try after the other."""
        texts = [
            self._store.get(f"checkpoint/{name}/report/1")
            for name in (spec.token, again(spec.token))
            if self._store.check([f"checkpoint/{name}/report/1"])
        ]
        return [ShardReport.from_json(text) for text in texts]

    def has_shard(self, spec: SaveSpec) -> bool:
        is_local = isinstance(self.place, DirectoryPlace)
        folder = self.place.unpublished(spec) if is_local else self.place.location(spec)
        return (folder / self._layout.own.file_name).exists()


@pytest.fixture(params=["directory", "object store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return in_directory(tmp_path) if request.param == "directory" else in_memory(tmp_path)


@pytest.mark.parametrize(
    ("heard", "told"),
    [
        *[((), told) for told in ((), (COMMITTED,), (FAILED,))],
        *[
            (heard, (AGAIN, *told))
            for heard in ((), (AGAIN,))
            for told in ((), (COMMITTED,), (FAILED,))
        ],
    ],
)
def test_a_rank_that_hears_no_verdict_leaves_its_part_until_it_does(
    place: Place, heard: tuple[Verdict, ...], told: tuple[Verdict, ...]
) -> None:
    rank = OtherRank(place, timeout_s=0.3)
    unheard = rank.save(10, *heard)
    assert rank.has_shard(unheard)  # rank 0 may have published it
    rank.tell(unheard, *told)
    rank.save(20, FAILED)
    assert rank.has_shard(unheard) == (FAILED not in told)


def test_what_is_written_counts_for_the_next_try(place: Place) -> None:
    rank = OtherRank(place, timeout_s=WAIT_S)
    spec = rank.save(10, AGAIN, COMMITTED)
    first, second = rank.reports(spec)
    assert first == second
    assert first.shard is not None
    assert rank.has_shard(spec)
    assert not rank.has_shard(rank.save(20, AGAIN, FAILED))


def test_a_write_that_hangs_is_not_begun_again(place: Place) -> None:
    rank = OtherRank(place, timeout_s=0.5)
    ends = threading.Event()

    def hang(point: SavePoint) -> None:
        if point is SavePoint.WRITING_SHARD:
            ends.wait(WAIT_S)

    spec = rank.save(10, AGAIN, FAILED, on_point=hang)
    ends.set()
    assert [report.error for report in rank.reports(spec)] == [
        "the storage did not answer in time"
    ] * 2


def test_nothing_of_a_try_stays_in_the_store(place: Place) -> None:
    rank = OtherRank(place, timeout_s=WAIT_S)
    first = rank.save(10, AGAIN, COMMITTED)
    assert len(rank.reports(first)) == 2
    rank.save(20, COMMITTED)
    assert rank.reports(first) == []


def test_a_part_of_a_save_that_failed_goes_at_once(place: Place) -> None:
    rank = OtherRank(place, timeout_s=WAIT_S)
    assert not rank.has_shard(rank.save(10, FAILED))


class HeldAt:
    """Waits at a point, once, until it is released; as a file system that hangs there does."""

    def __init__(self, point: SavePoint) -> None:
        self._point = point
        self.release = threading.Event()

    def __call__(self, point: SavePoint) -> None:
        if point is self._point:
            self.release.wait(WAIT_S)


def test_what_hung_while_it_was_published_is_not_there_once_the_storage_is_well(
    tmp_path: Path,
) -> None:
    held = HeldAt(SavePoint.PUBLISHED)
    saver = make_saver(tmp_path, on_point=held, timeout_s=0.5)
    outcome = save(saver, 1, weights(1))
    assert not outcome.ok
    assert "did not answer in time" in outcome.reason
    held.release.set()
    assert save(saver, 2, weights(2)).ok
    assert published(tmp_path) == [f"{PREFIX}-step-00000002"]
    assert list(claimed(tmp_path).staging.iterdir()) == []


def test_a_rename_that_hung_is_undone_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = make_saver(tmp_path, timeout_s=0.5)
    assert save(saver, 1, weights(1)).ok
    release = threading.Event()
    rename, renamed = Path.rename, []

    def hanging(path: Path, target: Path) -> Path:
        if target.name.endswith("-step-00000002"):
            release.wait(WAIT_S)
            renamed.append(target)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", hanging)
    assert not save(saver, 2, weights(2)).ok
    release.set()
    wait_for(lambda: renamed)
    wait_for(lambda: published(tmp_path) == [f"{PREFIX}-step-00000001"])


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_what_a_lost_writer_has_published_does_not_stay(tmp_path: Path, signal_number: int) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    process = WriterProcess()
    mark, root = tmp_path / "mark", tmp_path / "root"
    mark.touch()
    at = At(SavePoint.PUBLISHED, signal_number, mark)
    saver = make_saver(root, on_point=at, executor=process, timeout_s=4.0)
    wait_for(lambda: save(saver, 1, weights(1)).ok)  # the process has to start in its time
    mark.unlink()
    assert not save(saver, 2, weights(2)).ok
    assert mark.exists()
    assert save(saver, 3, weights(3)).ok
    assert published(root) == [f"{PREFIX}-step-0000000{step}" for step in (1, 3)]
    assert list(claimed(root).staging.iterdir()) == []
    assert saver.close(WAIT_S)


def test_only_what_the_save_itself_has_published_is_withdrawn(tmp_path: Path) -> None:
    saver = make_saver(tmp_path)
    assert save(saver, 1, weights(1)).ok
    place = DirectoryPlace(directories=claimed(tmp_path))
    spec = OtherRank(place, WAIT_S).save(1, FAILED)
    manifest = read_manifest(place.location(spec))
    place.withdraw(spec, replace(manifest, created_time_s=manifest.created_time_s + 1e-3))
    assert published(tmp_path) == [spec.name]
    place.withdraw(spec, manifest)
    assert published(tmp_path) == []
    place.withdraw(spec, manifest)
