"""A failure is shown once, retried where that can help, and never waited out."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.conftest import TrainRun
from tests.recovery.runs import NO_LAST_SAVE, PAIR, column, digest_of, faulty, undisturbed
from tests.recovery.test_kill import TINY, rank_pid, steps_done

Start = Callable[..., TrainRun]
PROMPT_S = 8.0


def delays_s(run: TrainRun) -> list[float]:
    """From each failure to its detection."""
    return [event["time_s"] - event["failed_time_s"] for event in run.events("failure_detected")]


def test_exception_on_one_rank_ends_the_run(train: Start) -> None:
    run = train(*TINY, *faulty(fail_rank=2, fail_step=3), "recovery.max_restarts=1")
    assert run.returncode == 1
    failures = run.events("failure_detected")
    # Two steps were progress; then the same step twice more.
    assert len(failures) == 3
    assert {(f["failed_rank"], f["node"], f["kind"]) for f in failures} == {
        (2, "v100-0", "exception")
    }
    assert len(run.events("restart")) == 2
    # One traceback an attempt, of the rank that began it and of none that lost its peer.
    assert run.output.count("Traceback (most recent call last)") == len(failures)
    assert run.output.count("FAILURE rank 2 on v100-0: RuntimeError: broken on purpose") == 3
    assert max(delays_s(run)) < PROMPT_S
    status = run.read_json("status.json")
    assert status["status"] == "FAILED"
    assert status["step"] == 2
    assert "rank 2 on v100-0: RuntimeError: broken on purpose" in status["reason"]
    assert "recovery.max_restarts=1" in status["reason"]
    assert run.read_json("summary.json")["status"] == "FAILED"


def emergencies(run: TrainRun) -> list[tuple[int, int, bool]]:
    """Step, rank that asked, and whether it was saved."""
    return [
        (event["step"], event["asking_rank"], event["is_saved"])
        for event in run.events("emergency_save")
    ]


def test_passing_exception_costs_nothing_but_time(
    start_train: Start, tmp_path: Path, run_dir: Path
) -> None:
    marker = tmp_path / "failed"
    fault = faulty(fail_rank=1, fail_step=8, marker=marker)
    run = start_train(*PAIR, *fault, "ckpt.interval_steps=12").wait()
    assert run.returncode == 0, run.output
    (failure,) = run.events("failure_detected")
    assert failure["failed_rank"] == 1
    # All ranks stood at step 7, and none has to be computed again.
    assert emergencies(run) == [(7, 1, True)]
    assert "rank 1 has raised; step 7 is saved: 7 steps" in run.output
    assert run.events("restored")[0]["step"] == 7
    assert run.read_json("summary.json")["lost_steps"] == 0
    assert digest_of(run_dir) == digest_of(undisturbed(tmp_path / "undisturbed", *PAIR))


def test_exception_of_the_only_rank(start_train: Start, tmp_path: Path) -> None:
    fault = faulty(fail_step=8, marker=tmp_path / "failed")
    alone = ("hardware=single_gpu", *TINY[1:])
    run = start_train(*alone, *fault, "ckpt.interval_steps=12").wait()
    assert run.returncode == 0, run.output
    assert emergencies(run) == [(7, 0, True)]
    assert run.events("restored")[0]["step"] == 7


def test_rank_that_never_ends_its_step(start_train: Start, tmp_path: Path) -> None:
    # It gives signs of life, so its peers wait until their collective gives up; they raise, and
    # the rank they wait for saves its part beside the thread that hangs.
    fault = faulty(fault="hang", fail_rank=1, fail_step=8, marker=tmp_path / "failed")
    bounds = ("recovery.process_group_timeout_s=6", "recovery.heartbeat_interval_s=1.5")
    run = start_train(*PAIR, *fault, *bounds, "ckpt.interval_steps=12").wait()
    assert run.returncode == 0, run.output
    assert emergencies(run) == [(7, 0, True)]
    assert run.events("restored")[0]["step"] == 7


def test_exception_while_the_weights_change_falls_back_to_the_last_save(
    start_train: Start, tmp_path: Path
) -> None:
    marker = tmp_path / "failed"
    run = start_train(
        *PAIR,
        "+callbacks.broken._target_=tests.recovery.modules.BreakOnce",
        "+callbacks.broken.step=8",
        f"+callbacks.broken.marker={marker}",
    ).wait()
    assert run.returncode == 0, run.output
    # Rank 0 has not reached the end of step 8, rank 1 may have. A save under way is waited for.
    assert not any(is_saved for _, _, is_saved in emergencies(run))
    assert run.events("restored")[0]["step"] == 6


def test_exception_of_which_nobody_wants_a_save(start_train: Start, tmp_path: Path) -> None:
    fault = faulty(fail_rank=1, fail_step=20, marker=tmp_path / "failed")
    run = start_train(*PAIR, *fault, NO_LAST_SAVE).wait()
    assert run.returncode == 0, run.output
    assert not emergencies(run)
    # Not always a multiple of the interval: a save waits for the one before it.
    restored = run.events("restored")[0]["step"]
    assert restored in {event["step"] for event in run.events("checkpoint_committed")}
    assert restored < 19


def test_configuration_error_is_never_retried(train: Start) -> None:
    run = train(*PAIR, *faulty(fault="config", fail_rank=1, fail_step=2))
    assert run.returncode == 1
    (failure,) = run.events("failure_detected")
    assert failure["kind"] == "configuration"
    assert not run.events("restart")
    assert "data.paths: refused on purpose." in run.read_json("status.json")["reason"]


def test_module_of_the_wrong_kind(train: Start) -> None:
    run = train(*PAIR, "model.module._target_=tests.recovery.modules.NoModule")
    assert run.returncode == 1
    assert not run.events("restart")
    assert "must be a LightningModule" in run.output


def test_a_model_that_no_checkpoint_holds_is_not_trained(train: Start) -> None:
    run = train(*PAIR, "model.module._target_=tests.recovery.modules.PackedGPT")
    assert run.returncode == 1
    assert not run.events("restart")
    assert not run.events("checkpoint_started")
    told = "model.module: dtypes that the format does not hold: codes (torch.uint4). "
    assert told in run.read_json("status.json")["reason"]


def test_module_that_steps_its_optimizer_itself(train: Start) -> None:
    # Seen in the ranks alone, as nothing of the module is built before where optim brings one.
    run = train(*PAIR, "model.module._target_=tests.recovery.modules.ManualGPT")
    assert run.returncode == 1
    assert not run.events("restart")
    assert "has automatic_optimization=False" in run.output
    assert "Traceback" not in run.output


def test_signal_to_every_process_of_the_run(start_train: Start, run_dir: Path) -> None:
    # As batch systems send it: to the supervisor, the fork server, agents, ranks and loaders.
    run = start_train(*PAIR, "data.num_workers=1")
    run.wait_until(lambda: steps_done(run) >= 8)
    os.killpg(run.process.pid, signal.SIGTERM)
    run.wait()
    assert run.returncode == 75, run.output
    status = run.read_json("status.json")
    assert status["status"] == "PREEMPTED"
    saved = [event["step"] for event in run.events("checkpoint_committed")]
    assert saved[-1] == status["step"] >= 8


def test_signal_while_a_rank_raises(start_train: Start, tmp_path: Path) -> None:
    fault = faulty(fault="stop_and_raise", fail_rank=1, fail_step=100, marker=tmp_path / "failed")
    longer = (*PAIR, *fault, NO_LAST_SAVE, "trainer.max_steps=110")
    run = start_train(*longer).wait()
    assert run.returncode == 75, run.output
    status = run.read_json("status.json")
    assert status["status"] == "PREEMPTED"
    for word in ("rank 1 on v100-0: RuntimeError: broken on purpose", "because SIGTERM came"):
        assert word in status["reason"]
    assert len(run.events("failure_detected")) == 1
    again = start_train(*longer).wait()
    assert again.returncode == 0, again.output


def test_rank_that_hangs_before_it_trains(start_train: Start) -> None:
    run = start_train(
        *PAIR, "recovery.heartbeat_interval_s=0.5", "recovery.heartbeat_max_missed=10"
    )
    run.wait_until(lambda: (run.run_dir / "attempts/0/ranks/1.pid").exists())
    os.kill(rank_pid(run, 1), signal.SIGSTOP)
    run.wait()
    assert run.returncode == 0, run.output
    assert run.events("heartbeat_missed")[0]["failed_rank"] == 1
    assert len(column(run.run_dir, "loss")) == 24


def test_thread_that_outlives_training(train: Start) -> None:
    target = "model.module._target_=tests.recovery.modules.LingeringGPT"
    beats = ("recovery.heartbeat_interval_s=0.5", "recovery.heartbeat_max_missed=6")
    run = train(*PAIR, target, *beats, "trainer.max_steps=2", timeout_s=60)
    assert run.returncode == 0, run.output


def test_checkpoint_directory_that_is_moved_away(start_train: Start, tmp_path: Path) -> None:
    run = start_train(*PAIR, "ckpt.interval_steps=4")
    run.wait_until(lambda: bool(run.events("checkpoint_committed")))
    (run.run_dir / "checkpoints").rename(tmp_path / "moved")
    run.wait()
    assert run.returncode == 0, run.output
    failed = run.events("checkpoint_failed")
    assert failed
    assert "the place of the checkpoints is gone" in failed[0]["reason"]
    assert "it was made again, empty, for the next save" in failed[0]["reason"]
    assert (run.run_dir / "checkpoints/hetero_ckpt-step-00000024/manifest.json").is_file()
    assert list((tmp_path / "moved").glob("hetero_ckpt-step-*"))


def test_run_directory_that_is_moved_away(start_train: Start, tmp_path: Path) -> None:
    run = start_train(*PAIR)
    run.wait_until(lambda: len(run.events("checkpoint_committed")) > 0)
    run.run_dir.rename(tmp_path / "moved")
    run.wait()
    assert run.returncode == 1, run.output
    last = run.output.splitlines()[-1]
    assert f"the run directory {run.run_dir} is gone, it is {tmp_path}/moved now" in last
    assert "is safe there. Move it back" in last
    assert "Traceback" not in run.output
    assert not run.run_dir.exists()
    assert [path.name for path in (tmp_path / "moved" / "attempts").iterdir()] == ["0"]
    (tmp_path / "moved").rename(run.run_dir)
    again = start_train(*PAIR).wait()
    assert again.returncode == 0, again.output
    assert "continuing from" in again.output


def test_command_that_takes_the_checkpoints_of_another_one_over(
    start_train: Start, tmp_path: Path
) -> None:
    storage = f"ckpt.storage={tmp_path / 'storage'}"
    run = start_train(*PAIR, storage, "trainer.max_steps=600")
    run.wait_until(lambda: len(run.events("checkpoint_committed")) > 0)
    # Its newest checkpoint may be of the last step already: then nothing is computed or saved.
    other = start_train(*PAIR, storage, "trainer.max_steps=6", f"paths.root={tmp_path / 'other'}")
    other.wait()
    assert other.returncode == 0, other.output
    number = len(run.events("checkpoint_failed"))
    run.wait_until(lambda: len(run.events("checkpoint_failed")) > number + 1)
    reasons = {event["reason"] for event in run.events("checkpoint_failed")}
    assert reasons == {"fenced by attempt 1"}
    run.process.terminate()
    run.wait()
