"""What a run that has ended says about its checkpoints, and what the same command would do."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
from omegaconf import DictConfig

from hetero_fw.app import compose_checked, kept
from hetero_fw.app.kept import finished_step, tell_what_is_kept, what_is_left
from hetero_fw.monitoring import EventLog, RunDirectory, Status, write_status
from hetero_fw.recovery import RunOutcome

EMULATED = ("hardware=a100_v100_mix", "hardware.emulation.host_flops_per_s=1e10")


def config(root: Path, *overrides: str) -> DictConfig:
    return compose_checked([f"paths.root={root}", "run_name=run", *EMULATED, *overrides])


def checkpoint(root: Path, step: int) -> None:
    folder = root / f"hetero_ckpt-step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def log(run_dir: RunDirectory, *records: tuple[str, int | None], attempt: int = 0) -> None:
    run_dir.path.mkdir(parents=True, exist_ok=True)
    with EventLog(run_dir.events_path, attempt) as events:
        for name, step in records:
            events.write(name, step=step, tiers=["storage"])


def ended(run_dir: RunDirectory, status: Status, step: int, cfg: DictConfig) -> str:
    return tell_what_is_kept(
        cfg, run_dir, RunOutcome(status=status, step=step, attempt=0, reason="")
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    """A run that has saved steps 6 and 12."""
    run_dir = RunDirectory(tmp_path / "run")
    log(run_dir, ("attempt_start", None), ("checkpoint_committed", 6), ("checkpoint_committed", 12))
    checkpoint(run_dir.checkpoints_path, 6)
    checkpoint(run_dir.checkpoints_path, 12)
    return run_dir


def test_a_restart_goes_on_from_what_is_there(tmp_path: Path, run_dir: RunDirectory) -> None:
    cfg = config(tmp_path)
    assert ended(run_dir, Status.FAILED, 14, cfg) == (
        "The newest committed checkpoint is that of step 12; a restart goes on from it."
    )
    shutil.rmtree(run_dir.checkpoints_path / "hetero_ckpt-step-00000012")
    told = ended(run_dir, Status.PREEMPTED, 14, cfg)
    assert told.startswith("Step 12 was committed, but is not there any more. ")
    assert told.endswith("is that of step 6; a restart goes on from it.")
    shutil.rmtree(run_dir.checkpoints_path)
    told = ended(run_dir, Status.FAILED, 14, cfg)
    assert told == (
        f"Step 12 was committed, but no checkpoint is left in {run_dir.checkpoints_path}: the same "
        "command begins at step 0."
    )


def test_what_cannot_be_seen_is_not_promised(
    tmp_path: Path, run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(run_dir.checkpoints_path)
    run_dir.checkpoints_path.symlink_to(tmp_path / "unmounted")
    told = ended(run_dir, Status.FAILED, 14, config(tmp_path))
    assert told.startswith("Step 12 was committed, but what is kept now cannot be seen: ")
    assert "No such file or directory" in told
    monkeypatch.setattr(kept, "_LOOK_TIMEOUT_S", 0.1)
    monkeypatch.setattr(kept, "_steps_there", lambda *arguments: threading.Event().wait(5.0))
    told = ended(run_dir, Status.FAILED, 14, config(tmp_path))
    assert told.endswith("cannot be seen: no answer within 0 s")


def test_a_storage_may_hold_what_an_earlier_run_directory_saved(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    log(run_dir, ("attempt_start", None))
    cfg = config(tmp_path, f"ckpt.storage={tmp_path / 'storage'}")
    assert ended(run_dir, Status.FAILED, 0, cfg) == (
        "No checkpoint was committed: the same command begins at step 0."
    )
    checkpoint(tmp_path / "storage" / "run", 24)
    assert "that of step 24" in ended(run_dir, Status.FAILED, 0, cfg)


def test_what_a_later_attempt_has_left_behind_is_not_gone_on_from(
    tmp_path: Path, run_dir: RunDirectory
) -> None:
    starts = (("attempt_start", None), ("restored", 6), ("checkpoint_committed", 9))
    log(run_dir, *starts, attempt=1)
    checkpoint(run_dir.checkpoints_path, 9)
    assert "that of step 9;" in ended(run_dir, Status.FAILED, 14, config(tmp_path))


def test_what_was_rejected_is_not_gone_on_from(tmp_path: Path, run_dir: RunDirectory) -> None:
    cfg = config(tmp_path)
    log(run_dir, ("attempt_start", None), ("checkpoint_rejected", 12), attempt=1)
    assert "that of step 6; a restart" in ended(run_dir, Status.FAILED, 0, cfg)
    log(run_dir, ("checkpoint_rejected", 6), attempt=1)
    assert ended(run_dir, Status.FAILED, 0, cfg) == (
        "Nothing is there that a restart could go on from: of the checkpoints in "
        f"{run_dir.checkpoints_path} all were rejected (steps 6, 12; events.jsonl says why)."
    )
    # One copy was damaged, another was not; and what is saved again is another checkpoint.
    log(run_dir, ("restored", 6), attempt=1)
    assert "that of step 6; a restart" in ended(run_dir, Status.FAILED, 0, cfg)
    log(run_dir, ("checkpoint_committed", 12), attempt=1)
    assert "that of step 12; a restart" in ended(run_dir, Status.FAILED, 0, cfg)


def test_training_that_ended_itself_is_not_gone_on_with(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    run_dir.path.mkdir()
    write_status(run_dir.status_path, Status.DONE, 5, 0)
    assert finished_step(config(tmp_path, "trainer.max_steps=7"), run_dir) is None
    with EventLog(run_dir.events_path, 0) as events:
        events.write("run_end", step=5, max_steps=7)
    assert finished_step(config(tmp_path, "trainer.max_steps=7"), run_dir) == 5
    assert finished_step(config(tmp_path, "trainer.max_steps=8"), run_dir) is None
    write_status(run_dir.status_path, Status.RUNNING, 5, 1)
    assert finished_step(config(tmp_path, "trainer.max_steps=7"), run_dir) is None


def test_a_last_step_that_nothing_has_kept_is_left_to_do(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    cfg = config(tmp_path, "trainer.max_steps=7")
    run_dir.path.mkdir()
    write_status(run_dir.status_path, Status.DONE, 7, 0)
    assert finished_step(cfg, run_dir) == 7  # a log that is gone says nothing
    log(run_dir, ("attempt_start", None))
    assert finished_step(cfg, run_dir) == 7  # such as under ckpt=none
    log(run_dir, ("checkpoint_started", 7), ("checkpoint_failed", 7))
    assert finished_step(cfg, run_dir) is None
    assert "no save of it has succeeded" in what_is_left(cfg, run_dir, 7)
    told = ended(run_dir, Status.DONE, 7, cfg)
    assert told.startswith("Warning: the storage has no checkpoint of step 7.")
    assert "The same command trains again" in told
    assert finished_step(config(tmp_path, "trainer.max_steps=7", "ckpt=none"), run_dir) == 7
    log(run_dir, ("attempt_start", None), ("checkpoint_committed", 7), attempt=1)
    assert finished_step(cfg, run_dir) == 7  # also if the user has deleted it since
    assert ended(run_dir, Status.DONE, 7, cfg) == ""


def test_a_last_step_that_came_from_the_storage_is_kept(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    cfg = config(tmp_path, "trainer.max_steps=7")
    log(run_dir, ("attempt_start", None), ("restored", 7), ("checkpoint_failed", 7))
    write_status(run_dir.status_path, Status.DONE, 7, 0)
    assert finished_step(cfg, run_dir) == 7
    assert ended(run_dir, Status.DONE, 7, cfg) == ""
