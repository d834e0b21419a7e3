from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hetero_fw.monitoring import EventLog, EventName, RunDirectory
from hetero_fw.recovery.failure import write_failure
from hetero_fw.recovery.run_place import RunPlace


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    (tmp_path / "run").mkdir()
    return RunDirectory(tmp_path / "run")


def commit(run_dir: RunDirectory, step: int, root: str) -> None:
    with EventLog(run_dir.events_path, 0) as events:
        path = f"{root}/hetero_ckpt-step-{step:08d}"
        events.write(EventName.CHECKPOINT_COMMITTED, step=step, tier="storage", path=path)


def test_a_directory_that_is_where_it_was_is_not_gone(run_dir: RunDirectory) -> None:
    assert not RunPlace(run_dir).is_gone


def test_one_that_was_moved_is_found_with_its_newest_save(
    run_dir: RunDirectory, tmp_path: Path
) -> None:
    place = RunPlace(run_dir)
    for step in (6, 12):
        commit(run_dir, step, str(run_dir.checkpoints_path))
    run_dir.path.rename(tmp_path / "moved")
    assert place.is_gone
    assert place.tell_loss() == (
        f"the run directory {run_dir.path} is gone, it is {tmp_path}/moved now; step 12 is safe "
        "there. Move it back, and the same command goes on from that step"
    )


def test_saves_on_another_storage_are_safe_where_they_are(
    run_dir: RunDirectory, tmp_path: Path
) -> None:
    place = RunPlace(run_dir)
    commit(run_dir, 6, "s3://bucket/run")
    run_dir.path.rename(tmp_path / "moved")
    assert "step 6 is safe in s3://bucket/run/hetero_ckpt-step-00000006." in place.tell_loss()


def test_one_that_was_moved_before_anything_was_saved(
    run_dir: RunDirectory, tmp_path: Path
) -> None:
    place = RunPlace(run_dir)
    run_dir.path.rename(tmp_path / "moved")
    assert place.tell_loss().endswith("nothing had been saved")


def test_one_that_was_deleted(run_dir: RunDirectory) -> None:
    place = RunPlace(run_dir)
    shutil.rmtree(run_dir.path)
    assert place.is_gone
    assert place.tell_loss().endswith("is gone, deleted while the run worked in it")


def test_a_storage_that_does_not_answer_is_no_proof(
    run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = RunPlace(run_dir)

    def stale(path: Path) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "stat", stale)
    assert not place.is_gone


def test_a_report_does_not_make_the_directory_again(run_dir: RunDirectory, tmp_path: Path) -> None:
    run_dir.path.rename(tmp_path / "moved")
    folder = run_dir.attempt_path(0) / "ranks"
    with pytest.raises(FileNotFoundError):
        write_failure(folder, ValueError("late"), rank=0, node="a", time_s=1.0)
    assert not run_dir.path.exists()
