"""What a run continues from, and that nothing but time is lost by it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TrainRun
from tests.recovery.runs import NO_LAST_SAVE, PAIR, column, digest_of, undisturbed
from tests.recovery.test_kill import rank_pid, steps_done, writers

Start = Callable[..., TrainRun]

# State beyond weights: random numbers, the place in a learning rate's course, loader processes.
STATEFUL = (
    *PAIR,
    "model.module.dropout=0.2",
    "optim.scheduler={_target_:torch.optim.lr_scheduler.CosineAnnealingLR,_partial_:true,T_max:24}",
)
MULTI_STEP = (
    "optim.scheduler={_target_:torch.optim.lr_scheduler.MultiStepLR,"
    "_partial_:true,milestones:[10,14]}"
)


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(tmp_path_factory.mktemp("plain"), *PAIR)


def test_random_numbers_schedule_and_loaders_continue(start_train: Start, tmp_path: Path) -> None:
    run = start_train(*STATEFUL, "data.num_workers=2")
    run.wait_until(lambda: steps_done(run) >= 9)
    os.kill(rank_pid(run, 1), signal.SIGKILL)
    run.wait()
    assert run.returncode == 0, run.output
    assert len(run.events("failure_detected")) == 1
    expected = undisturbed(tmp_path / "undisturbed", *STATEFUL)
    assert column(run.run_dir, "lr") == column(expected, "lr")
    assert column(run.run_dir, "loss") == column(expected, "loss")
    assert digest_of(run.run_dir) == digest_of(expected)


def test_schedule_with_milestones_continues(start_train: Start, run_dir: Path) -> None:
    run = start_train(*PAIR, MULTI_STEP)
    run.wait_until(lambda: steps_done(run) >= 7 and bool(run.events("checkpoint_committed")))
    os.kill(rank_pid(run, 0), signal.SIGKILL)
    run.wait()
    assert run.returncode == 0, run.output
    assert run.events("restored")[0]["step"] >= 6
    rates = [float(text) for text in column(run_dir, "lr")]
    assert rates == pytest.approx([1e-3] * 10 + [1e-4] * 4 + [1e-5] * 10)


def interrupted(start_train: Start, num_checkpoints: int) -> TrainRun:
    """A run that was killed after so many checkpoints."""
    run = start_train(*PAIR)
    run.wait_until(lambda: len(run.events("checkpoint_committed")) >= num_checkpoints)
    run.kill()
    return run


def damage_shard_of(checkpoint: Path) -> Path:
    """Flip a bit in the largest file of a checkpoint."""
    shard = max(checkpoint.glob("*.bin"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    return shard


def checkpoints_of(run: TrainRun) -> list[Path]:
    return sorted((run.run_dir / "checkpoints").glob("hetero_ckpt-step-*"))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def test_corrupt_checkpoint_is_rejected_by_name(start_train: Start, plain_run: Path) -> None:
    older, newest = checkpoints_of(interrupted(start_train, 2))[-2:]
    shard = damage_shard_of(newest)

    second = start_train(*PAIR)
    second.wait_until(lambda: second.events("restored"))
    assert len(writers(second)) <= 2  # those of the first try have ended
    second.wait()
    assert second.returncode == 0, second.output
    (rejected,) = second.events("checkpoint_rejected")
    assert rejected["path"] == str(newest)
    assert shard.name in rejected["reason"]
    assert rejected["step"] == step_of(newest)
    (restored,) = second.events("restored")
    assert restored["step"] == step_of(older)
    assert restored["bytes_read"] > restored["size_bytes"]
    assert attempts_of(second) == [0, 0, 1, 1]
    assert digest_of(second.run_dir) == digest_of(plain_run)
    column(second.run_dir, "loss")  # every step counts once


def attempts_of(run: TrainRun) -> list[int]:
    """Which attempt each start of a rank belonged to."""
    return sorted(event["attempt"] for event in run.events("attempt_start"))


def test_a_corrupt_only_checkpoint_means_a_fresh_start(start_train: Start, plain_run: Path) -> None:
    *older, newest = checkpoints_of(interrupted(start_train, 1))
    for path in older:
        shutil.rmtree(path)
    shard = damage_shard_of(newest)

    second = start_train(*PAIR).wait()
    assert second.returncode == 0, second.output
    (rejected,) = second.events("checkpoint_rejected")
    assert str(shard) in rejected["reason"]
    assert not second.events("restored")
    assert attempts_of(second) == [0, 0, 1, 1]
    assert digest_of(second.run_dir) == digest_of(plain_run)
    column(second.run_dir, "loss")


def test_must_ends_where_the_only_checkpoint_is_corrupt(start_train: Start) -> None:
    *older, newest = checkpoints_of(interrupted(start_train, 1))
    for path in older:
        shutil.rmtree(path)
    damage_shard_of(newest)
    second = start_train(*PAIR, "resume=must").wait()
    assert second.returncode == 1
    assert len(second.events("checkpoint_rejected")) == 1
    assert "resume=must" in second.read_json("status.json")["reason"]
    assert not second.events("restart")


def test_a_checkpoint_that_makes_training_diverge_is_quarantined(
    train: Start, run_dir: Path, tmp_path: Path
) -> None:
    run = train(
        *PAIR,
        NO_LAST_SAVE,
        "ckpt.async_mode=disabled",  # so that no save is postponed: the steps count here
        "model.module._target_=tests.recovery.modules.DivergingGPT",
        "+model.module.bad_step=12",
        "+model.module.interrupt_step=15",
        f"+model.module.awaited={run_dir / 'checkpoints' / 'hetero_ckpt-step-00000012'}",
        f"+model.module.marker={tmp_path / 'interrupted'}",
    )
    assert run.returncode == 0, run.output
    digest_of(run.run_dir)  # it is DONE
    assert [event["step"] for event in run.events("restored")] == [12, 12, 6]
    details = [event["detail"] for event in run.events("failure_detected")]
    assert len(details) == 3
    assert "the loss of step 14 is nan, 2 steps after the checkpoint of step 12" in details[1]
    assert "tried once more" in details[1]
    assert "quarantined" in details[2]
    (rejected,) = run.events("checkpoint_rejected")
    assert rejected["step"] == 12
    assert "at step 14 in attempt 1, at step 14 in attempt 2" in rejected["reason"]
    column(run.run_dir, "loss")  # every step counts once
    # The step was saved again on the way from the older one, and that is another checkpoint.
    incidents = json.loads((run.run_dir / "checkpoints" / "quarantine.json").read_text())
    assert {incident["saved_by"] for incident in incidents["incidents"]} == {0}


def test_what_was_restored_is_logged_with_what_it_cost(start_train: Start) -> None:
    run = start_train(*PAIR)
    run.wait_until(lambda: bool(run.events("checkpoint_committed")))
    os.kill(rank_pid(run, 1), signal.SIGKILL)
    run.wait()
    (restored,) = run.events("restored")
    assert restored["source"].endswith(f"hetero_ckpt-step-{restored['step']:08d}")
    assert restored["tiers"] == ["storage"]
    assert restored["bytes_read"] == restored["size_bytes"] > 10_000
    assert restored["read_s"] > 0


def test_end_between_the_last_checkpoint_and_the_status(
    start_train: Start, run_dir: Path, plain_run: Path
) -> None:
    run_dir.parent.mkdir()
    plain_run.rename(run_dir)
    digest = digest_of(run_dir)
    status = json.loads((run_dir / "status.json").read_text())
    (run_dir / "status.json").write_text(json.dumps({**status, "status": "RUNNING"}))
    run = start_train(*PAIR).wait()
    assert run.returncode == 0, run.output
    assert run.events("restored")[-1]["step"] == 24
    assert digest_of(run_dir) == digest
    run_dir.rename(plain_run)


def test_must_needs_a_checkpoint(train: Start, run_dir: Path) -> None:
    run = train(*PAIR, "resume=must")
    assert run.returncode == 2
    assert "resume=must" in run.output
    assert "Traceback" not in run.output
    assert not run_dir.exists()


def test_must_needs_a_checkpoint_that_verifies(train: Start, run_dir: Path) -> None:
    broken = run_dir / "checkpoints" / "hetero_ckpt-step-00000006"
    broken.mkdir(parents=True)
    (broken / "manifest.json").write_text("{}")
    run = train(*PAIR, "resume=must")
    assert run.returncode == 1
    (rejected,) = run.events("checkpoint_rejected")
    assert rejected["path"] == str(broken)
    assert "resume=must" in run.read_json("status.json")["reason"]
    assert not run.events("restart")


def test_never_leaves_checkpoints_alone(train: Start, run_dir: Path) -> None:
    committed = run_dir / "checkpoints" / "hetero_ckpt-step-00000006"
    committed.mkdir(parents=True)
    (committed / "manifest.json").write_text("{}")
    run = train(*PAIR, "resume=never")
    assert run.returncode == 2
    assert "resume=never" in run.output
    assert list(run_dir.iterdir()) == [run_dir / "checkpoints"]


def test_a_finished_run_whose_directory_is_lost_is_known_by_its_storage(
    start_train: Start, plain_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(plain_run / "checkpoints", tmp_path / "storage" / "run")
    run = start_train(*PAIR, f"ckpt.storage={tmp_path / 'storage'}").wait()
    assert run.returncode == 0, run.output
    assert "DONE after step 24." in run.output
    assert "Warning" not in run.output
    assert run.read_json("status.json")["step"] == 24
    assert run.read_json("summary.json")["steps"] == 24
    assert digest_of(run.run_dir) == digest_of(plain_run)


def test_weights_that_no_save_has_kept_are_trained_again(
    start_train: Start, plain_run: Path
) -> None:
    run = start_train(*PAIR)
    most = 100 * 1024  # less than a shard
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (most, most))
    run.wait()
    assert run.returncode == 0, run.output
    assert not run.events("checkpoint_committed")
    assert "The same command trains again what no checkpoint holds." in run.output
    again = start_train(*PAIR).wait()
    assert again.returncode == 0, again.output
    assert "is DONE after step 24, but no save of it has succeeded" in again.output
    assert again.events("checkpoint_committed")[-1]["step"] == 24
    assert digest_of(again.run_dir) == digest_of(plain_run)
    assert "asks for no more" in start_train(*PAIR).wait().output
