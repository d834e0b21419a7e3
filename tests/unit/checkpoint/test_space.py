"""What is refused for lack of space, and with which numbers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_fw.checkpoint import Metric, list_checkpoints
from hetero_fw.checkpoint.save_point import SavePoint
from hetero_fw.checkpoint.space import SpaceDemand, Volume, shortfalls, survey, tight_places
from hetero_fw.policies import RetentionRule
from tests.small_disk import small_disk
from tests.unit.checkpoint.examples import PREFIX, WAIT_S, Events, fill, make_saver, save, weights

GIB = 2**30
MIB = 2**20


def demand(
    *,
    checkpoint: float = 1.0,
    free: float = 10.0,
    held: float = 0.0,
    is_memory: bool = False,
    device: int = 1,
    path: str = "/x",
) -> SpaceDemand:
    """Sizes in GiB."""
    return SpaceDemand(
        key="paths.root",
        checkpoint_bytes=int(checkpoint * GIB),
        volume=Volume(
            path=Path(path),
            device=device,
            free_bytes=int(free * GIB),
            held_bytes=int(held * GIB),
            is_memory=is_memory,
        ),
    )


def problems(*demands: SpaceDemand, staging: float = 1.0, memory: float = 100.0) -> list[str]:
    return shortfalls(
        demands, staging_bytes=int(staging * GIB), available_memory_bytes=int(memory * GIB)
    )


def test_two_checkpoints_and_the_next_must_fit() -> None:
    assert problems(demand(free=3.0)) == []
    assert problems(demand(free=2.9)) != []
    (problem,) = problems(demand(checkpoint=1.2, free=0.9))
    assert problem.startswith(
        "ckpt: three checkpoints, two that are kept and one that is being written, need 3.60 GiB "
        "on /x; 921.60 MiB are free there. Free some, choose another place (paths.root), "
    )
    assert "ckpt=none" in problem


def test_room_for_less_than_is_to_be_kept_is_told_with_what_fits() -> None:
    wanted = replace(demand(free=6.5), keep_latest_k=4, num_besides=1)
    assert tight_places([wanted]) == []
    (warning,) = tight_places([replace(wanted, keep_latest_k=6)])
    assert problems(replace(wanted, keep_latest_k=6)) == []
    assert warning.startswith(
        "ckpt.keep_latest_k=6, with 1 best ones besides, takes 8.00 GiB on /x while one more is "
        "written; 6.50 GiB are free there, and 4 is the most that fits. "
    )
    (warning,) = tight_places([replace(wanted, num_besides=4)])
    assert "and not even 2 fit. " in warning
    # What another place on the same disk needs is not there for this one.
    other = demand(free=6.5, path="/y")
    (warning,) = tight_places([replace(wanted, num_besides=0), other])
    assert "ckpt.keep_latest_k=4 takes 5.00 GiB on /x" in warning
    assert "3.50 GiB are free there, and 2 is the most that fits." in warning


def test_what_gives_way_leaves_room() -> None:
    held = demand(held=3.0, free=0.5)
    assert problems(held) != []
    assert problems(replace(held, gives_way=True)) == []
    assert problems(replace(demand(held=2.5, free=0.9), gives_way=True)) != []
    (warning,) = tight_places([replace(held, gives_way=True, keep_latest_k=3)])
    assert "2 is the most that fits" in warning


def test_checkpoints_that_are_there_already_count() -> None:
    assert problems(demand(held=2.0, free=1.0)) == []
    assert problems(demand(held=1.5, free=1.4)) != []
    # However many are there, none goes before the next one is complete.
    (problem,) = problems(demand(held=3.0, free=0.9))
    assert "where checkpoints of 3.00 GiB are already, and the next one 1.00 GiB more" in problem


def test_places_on_one_device_share_its_space() -> None:
    both = (demand(free=5.0), demand(free=5.0, path="/y"))
    (problem,) = problems(*both)
    assert "need 3.00 GiB on /x and three checkpoints, " in problem
    assert "need 3.00 GiB on /y; 5.00 GiB are free" in problem
    assert problems(both[0], demand(free=5.0, path="/y", device=2)) == []


def test_host_memory_holds_the_copy_and_what_lies_in_memory() -> None:
    assert problems(demand(), staging=1.0, memory=1.0) == []
    (problem,) = problems(demand(), staging=1.0, memory=0.5)
    assert "needs 1.00 GiB of host memory; 512.00 MiB are available" in problem
    in_memory = demand(is_memory=True, path="/dev/shm/x")
    assert problems(in_memory, memory=4.0) == []
    (problem,) = problems(in_memory, memory=3.9)
    assert "needs 1.00 GiB and checkpoints in /dev/shm/x 3.00 GiB of host memory" in problem
    assert "choose a disk for them (paths.root)" in problem
    assert len(problems(demand(is_memory=True, free=1.0), memory=0.5)) == 2


def test_a_disk_is_surveyed(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 32 * MIB) as disk:
        before = survey(disk / "run" / "checkpoints", PREFIX)
        assert before.free_bytes == 32 * MIB
        assert (before.held_bytes, before.is_memory) == (0, True)
        root = disk / "run" / "checkpoints"
        fill(root, [1, 2], size=100_000)
        after = survey(root, PREFIX)
        assert 3.6e6 < after.held_bytes < 3.8e6
        assert after.free_bytes + after.held_bytes == pytest.approx(32 * MIB, abs=MIB / 4)
        (root / ".staging-1" / "left").write_bytes(bytes(4 * MIB))
        assert survey(root, PREFIX).free_bytes == pytest.approx(after.free_bytes, abs=MIB / 4)
        assert survey(root, "other").held_bytes == 0


def test_a_real_disk_is_no_memory(tmp_path: Path) -> None:
    volume = survey(tmp_path / "a" / "b", PREFIX)
    assert volume.free_bytes > 0
    assert volume.device == tmp_path.stat().st_dev
    assert not volume.is_memory or tmp_path.resolve().is_relative_to("/dev/shm")


@pytest.mark.parametrize(("disk_mib", "fits"), [(15, False), (17, True)])
def test_what_is_refused_would_not_have_fitted(tmp_path: Path, disk_mib: int, fits: bool) -> None:
    """The estimate and saves on a disk that two checkpoints and a third one fill agree."""
    tensors = weights(1, size=300_000)  # 5.4 MB
    size = sum(tensor.nbytes for tensor in tensors.values())
    with small_disk(tmp_path / "disk", disk_mib * MIB) as disk:
        root = disk / "checkpoints"
        place = SpaceDemand(key="paths.root", checkpoint_bytes=size, volume=survey(root, PREFIX))
        found = shortfalls([place], staging_bytes=0, available_memory_bytes=GIB)
        assert (found == []) is fits
        saver = make_saver(root, retention=RetentionRule(keep_latest_k=2))
        outcomes = [save(saver, step, tensors) for step in range(1, 7)]
    assert [outcome.ok for outcome in outcomes] == [True, True, *[fits] * 4]
    assert fits or "No space left" in outcomes[-1].reason


class OthersFill:
    """Somebody else takes all the room that deleting a checkpoint makes, in the same moment."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self.num_files = 0

    def __call__(self, point: SavePoint) -> None:
        if point is SavePoint.DELETED:
            self.fill()

    def fill(self) -> None:
        room = shutil.disk_usage(self._disk).free
        self.num_files += 1
        (self._disk / f"of-others-{self.num_files}").write_bytes(bytes(room - MIB // 4))


def saved_on(
    disk: Path, rule: RetentionRule, values: list[float | None]
) -> tuple[list[int], list[int]]:
    """Steps from 1 on that were saved, and those that are left."""
    events: Events = []
    saver = make_saver(disk / "checkpoints", events, retention=rule)
    saved = []
    for step, value in enumerate(values, start=1):
        metric = None if value is None else Metric(name="loss", value=value)
        handle = saver.save(step, weights(step, size=300_000), {}, reason="test", metric=metric)
        assert handle.wait(WAIT_S)
        assert handle.outcome is not None
        saved += [step] * handle.outcome.ok
    failures = [fields["message"] for event, _, fields in events if event == "checkpoint_failed"]
    assert failures == []
    return saved, [info.step for info in list_checkpoints(disk / "checkpoints", PREFIX)]


def test_a_save_without_room_makes_some(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "disk", 17 * MIB) as disk:
        rule = RetentionRule(keep_latest_k=4)
        saved, left = saved_on(disk, rule, [None] * 9)
        assert (saved, left) == ([*range(1, 10)], [9, 8])
    (told,) = [text for text in caplog.messages if "is tried again" in text]
    assert told.startswith("rank 0: the storage is full, 5.15 MiB are needed")
    assert told.endswith(
        "; hetero_ckpt-step-00000001 was deleted to make room and ckpt.keep_latest_k=2 holds from "
        "now on; the save of step 4 is tried again"
    )


def test_what_is_kept_besides_goes_only_where_nothing_else_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", 23 * MIB) as disk:
        rule = RetentionRule(keep_latest_k=3, monitor="loss", keep_every_n_steps=100)
        saved, left = saved_on(disk, rule, [0.1, *[1.0 + step for step in range(9)]])
        assert saved == [*range(1, 11)]
        assert left == [10, 9, 1]
    caplog.clear()
    with small_disk(tmp_path / "smaller", 17 * MIB) as disk:
        saved, left = saved_on(disk, rule, [0.1, *[1.0 + step for step in range(8)]])
        assert (saved, left) == ([*range(1, 10)], [9, 8])
        (told,) = [text for text in caplog.messages if "is tried again" in text]
        assert "ckpt.keep_latest_k=2, ckpt.keep_best=0 holds from now on" in told


def test_a_disk_that_others_fill_takes_no_more_than_it_must(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 40 * MIB) as disk:
        events: Events = []
        rule = RetentionRule(keep_latest_k=2, keep_every_n_steps=1)
        others = OthersFill(disk)
        saver = make_saver(disk / "checkpoints", events, retention=rule, on_point=others)
        for step in (1, 2, 3, 4, 5):
            assert save(saver, step, weights(step, size=300_000)).ok
        others.fill()
        for step in (6, 7, 8):
            assert not save(saver, step, weights(step, size=300_000)).ok
        left = [info.step for info in list_checkpoints(disk / "checkpoints", PREFIX)]
        assert left == [5, 4, 3, 2]
        first, *later = [f["message"] for event, _, f in events if event == "checkpoint_failed"]
        assert "hetero_ckpt-step-00000001 was deleted to make room; step 5 is safe" in first
        assert not any("was deleted" in message for message in later)
