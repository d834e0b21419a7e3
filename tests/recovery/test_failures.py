"""A failure is shown once, retried where that can help, and never waited out."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.conftest import TrainRun
from tests.recovery.runs import PAIR, column, digest_of, faulty, undisturbed
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


def test_passing_exception_costs_nothing_but_time(
    start_train: Start, tmp_path: Path, run_dir: Path
) -> None:
    marker = tmp_path / "failed"
    run = start_train(*PAIR, *faulty(fail_rank=1, fail_step=8, marker=marker)).wait()
    assert run.returncode == 0, run.output
    (failure,) = run.events("failure_detected")
    assert failure["failed_rank"] == 1
    assert run.events("restored")[0]["step"] == 6
    assert digest_of(run_dir) == digest_of(undisturbed(tmp_path / "undisturbed", *PAIR))


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
