"""Emergency saves of real runs: once, all ranks at one step, and training goes on unchanged."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TrainRun
from tests.recovery.runs import digest_of, undisturbed
from tests.recovery.test_kill import TINY, rank_pid, steps_done

Start = Callable[..., TrainRun]

# No save falls due before the last step.
SECTION = "callbacks.emergency_save"
RUN = (*TINY, "ckpt.interval_steps=1000")
SOURCE = f"{SECTION}.source={{_target_:tests.recovery.telemetry_source.HotRank"
QUICK = (
    f"{SECTION}.interval_s=0.02",
    f"{SECTION}.host_memory_percent={{above:95,sustained_s:0.1,rearm_below:90}}",
)


@pytest.fixture(scope="module")
def undisturbed_digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    return digest_of(undisturbed(tmp_path_factory.mktemp("undisturbed"), *RUN))


def one_save(run: TrainRun) -> dict[str, Any]:
    """The only emergency save, once it is sure that every rank made it for the same step."""
    (event,) = run.events("emergency_save")
    staged = [e["rank"] for e in run.events("checkpoint_staged") if e["step"] == event["step"]]
    assert sorted(staged) == [0, 1, 2, 3]
    committed = [e["step"] for e in run.events("checkpoint_committed")]
    assert committed == [event["step"], 24]
    return event


def manifest_of(run: TrainRun, step: int) -> dict[str, Any]:
    path = run.run_dir / f"checkpoints/hetero_ckpt-step-{step:08d}/manifest.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_rank_over_its_limit_brings_about_one_save_of_all(
    train: Start, undisturbed_digest: str
) -> None:
    hot = f"{SOURCE},hot_rank:2,after_readings:5,broken_rank:1}}"
    run = train(*RUN, *QUICK, hot)
    assert run.returncode == 0, run.output
    event = one_save(run)
    assert (event["rank"], event["asking_rank"]) == (2, 2)
    assert event["reason"].startswith("host_memory_percent 97.5 %, above 95 % for ")
    assert "rank 2: host_memory_percent" in manifest_of(run, event["step"])["reason"]
    assert digest_of(run.run_dir) == undisturbed_digest
    told = "rank 1: HotRank cannot be read: OSError: no sensor. Training goes on without it."
    assert run.output.count(told) == 1


def test_a_signal_saves_and_the_run_goes_on(start_train: Start, undisturbed_digest: str) -> None:
    run = start_train(*RUN, f"{SECTION}.save_signals=[SIGUSR1]")
    run.wait_until(lambda: steps_done(run) >= 3)
    # As a batch system does: every process of the job gets it.
    for pid in (run.process.pid, *(rank_pid(run, rank) for rank in range(4))):
        os.kill(pid, signal.SIGUSR1)
    run.wait()
    assert run.returncode == 0, run.output
    event = one_save(run)
    assert event["reason"] == "SIGUSR1 received"
    assert "SIGUSR1" in manifest_of(run, event["step"])["reason"]
    assert digest_of(run.run_dir) == undisturbed_digest


def test_a_signal_to_the_run_alone_saves_too(start_train: Start) -> None:
    run = start_train(*RUN, f"{SECTION}.save_signals=[SIGUSR2]", "trainer.max_steps=60")
    run.wait_until(lambda: steps_done(run) >= 3)
    run.process.send_signal(signal.SIGUSR2)
    run.wait_until(lambda: run.events("emergency_save"))
    # Signals of neither list are ignored, the others still end the run.
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    assert run.returncode == 75, run.output
    assert [e["reason"] for e in run.events("emergency_save")] == ["SIGUSR2 received"]


def test_a_signal_that_is_not_listed_is_ignored(
    start_train: Start, undisturbed_digest: str
) -> None:
    run = start_train(*RUN, "recovery.signals=[SIGTERM]", "callbacks=none")
    run.wait_until(lambda: steps_done(run) >= 2)
    for pid in (run.process.pid, rank_pid(run, 1)):
        os.kill(pid, signal.SIGUSR1)
    run.wait()
    assert run.returncode == 0, run.output
    assert run.events("emergency_save") == []
    assert digest_of(run.run_dir) == undisturbed_digest


def test_ranks_that_do_not_stop_in_time_are_killed(start_train: Start, run_dir: Path) -> None:
    run = start_train(*RUN, "recovery.grace_s=1")
    run.wait_until(lambda: steps_done(run) >= 3)
    os.kill(rank_pid(run, 1), signal.SIGSTOP)
    run.process.send_signal(signal.SIGTERM)
    run.wait(60)
    assert run.returncode == 75, run.output
    status = run.read_json("status.json")
    assert status["status"] == "PREEMPTED"
    assert "recovery.grace_s=1" in status["reason"]
