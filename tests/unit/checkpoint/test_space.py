"""What is refused for lack of space, and with which numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_fw.checkpoint.space import SpaceDemand, Volume, shortfalls, survey
from tests.small_disk import small_disk
from tests.unit.checkpoint.examples import PREFIX, fill, make_saver, save, weights

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


def test_two_checkpoints_must_fit() -> None:
    assert problems(demand(free=2.0)) == []
    (problem,) = problems(demand(checkpoint=1.2, free=0.9))
    assert problem.startswith(
        "ckpt: two checkpoints need 2.40 GiB on /x; 921.60 MiB are free there. Free some, choose "
        "another place (paths.root), "
    )
    assert "ckpt=none" in problem


def test_checkpoints_that_are_there_already_count() -> None:
    assert problems(demand(held=1.0, free=1.0)) == []
    assert problems(demand(held=0.5, free=1.4)) != []
    # However many are there, none goes before the next one is complete.
    (problem,) = problems(demand(held=3.0, free=0.9))
    assert "where checkpoints of 3.00 GiB are already, and the next one 1.00 GiB more" in problem


def test_places_on_one_device_share_its_space() -> None:
    both = (demand(free=3.0), demand(free=3.0, path="/y"))
    (problem,) = problems(*both)
    assert "2.00 GiB on /x and two checkpoints need 2.00 GiB on /y; 3.00 GiB are free" in problem
    assert problems(both[0], demand(free=3.0, path="/y", device=2)) == []


def test_host_memory_holds_the_copy_and_what_lies_in_memory() -> None:
    assert problems(demand(), staging=1.0, memory=1.0) == []
    (problem,) = problems(demand(), staging=1.0, memory=0.5)
    assert "needs 1.00 GiB of host memory; 512.00 MiB are available" in problem
    in_memory = demand(is_memory=True, path="/dev/shm/x")
    assert problems(in_memory, memory=3.0) == []
    (problem,) = problems(in_memory, memory=2.9)
    assert "needs 1.00 GiB and checkpoints in /dev/shm/x 2.00 GiB of host memory" in problem
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


def test_what_is_refused_would_not_have_fitted(tmp_path: Path) -> None:
    """The estimate and a save on a full disk agree."""
    tensors = weights(1, size=300_000)  # 5.4 MB
    size = sum(tensor.nbytes for tensor in tensors.values())
    with small_disk(tmp_path / "disk", 12 * MIB) as disk:
        saver = make_saver(disk / "checkpoints")
        for step, fits in ((1, True), (2, True), (3, False)):
            place = SpaceDemand(
                key="paths.root",
                checkpoint_bytes=size,
                volume=survey(disk / "checkpoints", PREFIX),
            )
            found = shortfalls([place], staging_bytes=0, available_memory_bytes=GIB)
            assert (found == []) is fits
            outcome = save(saver, step, tensors)
            assert outcome.ok is fits
        assert "No space left" in outcome.reason
