"""Whatever is killed, the run ends with the weights of an undisturbed one and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hetero_fw.checkpoint.writer_process import PROCESS_NAME
from tests.conftest import REPOSITORY, TrainRun

# Small enough for a second of training, large enough that every rank computes something.
TINY = (
    "hardware=a100_v100_mix",
    "hardware.emulation.dilation=3000",
    "model.module.model_dim=32",
    "model.module.num_layers=2",
    "data.sequence_length=16",
    "trainer.max_steps=24",
    "ckpt=fixed",
    "ckpt.interval_steps=6",
    "monitor.line_interval_steps=1",
)

Start = Callable[..., TrainRun]


@pytest.fixture(scope="module")
def undisturbed_digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the weights after a run that nobody touched."""
    root = tmp_path_factory.mktemp("undisturbed")
    command = [sys.executable, str(REPOSITORY / "train.py"), f"paths.root={root}", "run_name=run"]
    done = subprocess.run([*command, *TINY], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return digest_of(root / "run")


def digest_of(run_dir: Path) -> str:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "DONE"
    return str(summary["weights_digest"])


def steps_done(run: TrainRun) -> int:
    path = run.run_dir / "metrics.csv"
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    return int(lines[-1].split(",")[0]) if lines else 0


def rank_pid(run: TrainRun, rank: int, attempt: int = 0) -> int:
    return int((run.run_dir / f"attempts/{attempt}/ranks/{rank}.pid").read_text())


def agents(run: TrainRun) -> list[psutil.Process]:
    """Processes that are neither the supervisor, a rank, its writer, nor multiprocessing's own."""
    ranks = {rank_pid(run, rank) for rank in range(4)}
    found = []
    for process in run.processes():
        text = " ".join(process.cmdline())
        is_forked = "forkserver" in text and process.pid not in ranks
        is_forked = is_forked and process.name() != PROCESS_NAME
        parent = process.parent()
        if is_forked and parent is not None and "forkserver" in " ".join(parent.cmdline()):
            found.append(process)
    return found


@pytest.mark.parametrize(("rank", "step"), [(0, 1), (2, 7), (3, 15)])
def test_killed_rank_costs_nothing_but_time(
    start_train: Start, undisturbed_digest: str, rank: int, step: int
) -> None:
    run = start_train(*TINY)
    run.wait_until(lambda: steps_done(run) >= step)
    os.kill(rank_pid(run, rank), signal.SIGKILL)
    run.wait()
    assert run.returncode == 0, run.output
    assert digest_of(run.run_dir) == undisturbed_digest
    (failure,) = run.events("failure_detected")
    assert failure["failed_rank"] == rank
    assert failure["kind"] == "process_killed"
    (restored,) = run.events("restored") or [{"step": 0}]
    assert restored["step"] in {0, 6, 12, 18}
    steps = [line.split(",")[0] for line in (run.run_dir / "metrics.csv").read_text().split()[1:]]
    assert steps == [str(number) for number in range(1, 25)]


def test_killed_tree_continues_with_the_same_command(
    start_train: Start, undisturbed_digest: str
) -> None:
    first = start_train(*TINY)
    first.wait_until(lambda: len(first.events("checkpoint_committed")) >= 2)
    first.kill()
    second = start_train(*TINY).wait()
    assert second.returncode == 0, second.output
    assert second.events("restored")[0]["step"] >= 12
    assert digest_of(second.run_dir) == undisturbed_digest


def test_killed_supervisor_takes_everything_with_it(start_train: Start) -> None:
    run = start_train(*TINY)
    run.wait_until(lambda: steps_done(run) >= 2)
    # A stopped rank cannot end itself; the kernel has to.
    os.kill(rank_pid(run, 1), signal.SIGSTOP)
    run.process.kill()
    run.process.wait(5)
    # The fixture asserts that no process is left.


def test_killed_agent_is_replaced(start_train: Start, undisturbed_digest: str) -> None:
    run = start_train(*TINY)
    run.wait_until(lambda: steps_done(run) >= 3)
    found = agents(run)
    assert len(found) == 2
    found[0].kill()
    run.wait()
    assert run.returncode == 0, run.output
    assert digest_of(run.run_dir) == undisturbed_digest


def test_stopped_rank_is_found_by_its_silence(start_train: Start, undisturbed_digest: str) -> None:
    run = start_train(*TINY, "recovery.heartbeat_interval_s=1", "recovery.heartbeat_max_missed=3")
    run.wait_until(lambda: steps_done(run) >= 8)
    os.kill(rank_pid(run, 2), signal.SIGSTOP)
    run.wait()
    assert run.returncode == 0, run.output
    (missed,) = run.events("heartbeat_missed")
    assert missed["failed_rank"] == 2
    assert digest_of(run.run_dir) == undisturbed_digest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_stop_signal_saves_and_the_same_command_goes_on(
    start_train: Start, undisturbed_digest: str, number: signal.Signals
) -> None:
    run = start_train(*TINY)
    run.wait_until(lambda: steps_done(run) >= 8)
    # Batch systems send several, and the same one more than once.
    for each in (number, signal.SIGUSR2, number):
        run.process.send_signal(each)
    run.wait()
    assert run.returncode == 75, run.output
    status = run.read_json("status.json")
    assert status["status"] == "PREEMPTED"
    assert run.read_json("summary.json")["lost_steps"] == 0
    again = start_train(*TINY).wait()
    assert again.returncode == 0, again.output
    assert again.events("restored")[-1]["step"] == status["step"]
    assert digest_of(run.run_dir) == undisturbed_digest


def test_done_run_is_not_trained_again(start_train: Start) -> None:
    first = start_train(*TINY, "trainer.max_steps=2").wait()
    kept = [path.name for path in (first.run_dir / "checkpoints").iterdir()]
    assert kept == ["hetero_ckpt-step-00000002"]
    again = start_train(*TINY, "trainer.max_steps=2").wait()
    assert again.returncode == 0
    assert "DONE" in again.output
    assert len(again.events("run_end")) == 1


def writers(run: TrainRun) -> list[psutil.Process]:
    return [process for process in run.processes() if process.name() == PROCESS_NAME]


def test_killed_writers_cost_a_save_at_most(start_train: Start, undisturbed_digest: str) -> None:
    run = start_train(*TINY)
    run.wait_until(lambda: steps_done(run) >= 2 and len(writers(run)) == 4)
    for process in writers(run):
        process.kill()
    run.wait_until(lambda: run.events("writer_restart"))
    run.wait_until(lambda: run.events("checkpoint_committed"))
    killed = {process.pid for process in writers(run)[:2]}
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    run.wait()
    assert run.returncode == 0, run.output
    assert digest_of(run.run_dir) == undisturbed_digest
    assert {event["attempt"] for event in run.events("attempt_end")} == {0}
    assert run.events("checkpoint_committed")[-1]["step"] == 24
    assert len(run.events("writer_restart")) >= 4
    # Within a step, or with the save that it cost.
    first = [event for event in run.events("writer_restart") if event["step"] is None]
    assert first
