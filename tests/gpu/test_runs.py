"""`train.py` on this machine's own GPU: it trains there, and failures cost no step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hetero_fw.profiling import match_device
from tests.conftest import TrainRun
from tests.recovery.runs import column, digest_of, faulty, undisturbed
from tests.recovery.test_failures import emergencies
from tests.recovery.test_kill import rank_pid, steps_done

pytestmark = pytest.mark.gpu

Start = Callable[..., TrainRun]
Train = Callable[..., TrainRun]

ALWAYS = "hardware.emulate=always"
# Steps take milliseconds, so a kill needs many to hit one in time.
NUM_STEPS = 300


def on_gpu(precision: str = "32-true") -> tuple[str, ...]:
    name = match_device(torch.cuda.get_device_name(0))
    assert name is not None, f"{torch.cuda.get_device_name(0)} is not in the catalog"
    return (
        "hardware=single_gpu",
        f"hardware.groups.gpu.device={name}",
        "hardware.emulate=never",
        f"parallel.precision={precision}",
        "data.global_batch_size=16",
        f"trainer.max_steps={NUM_STEPS}",
        "ckpt=fixed",
        "ckpt.interval_steps=20",
        "monitor.line_interval_steps=1",
    )


def test_it_trains_as_the_cpu_does(train: Train, tmp_path: Path) -> None:
    run = train(*on_gpu(), "trainer.max_steps=10")
    assert run.returncode == 0, run.output
    assert "EMULATED" not in run.output
    assert not run.read_json("summary.json")["emulated"]
    gpu = [float(loss) for loss in column(run.run_dir, "loss")]
    emulated = undisturbed(tmp_path / "cpu", *on_gpu(), "trainer.max_steps=10", ALWAYS)
    cpu = [float(loss) for loss in column(emulated, "loss")]
    assert gpu == pytest.approx(cpu, rel=1e-4)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_killed_rank_continues_from_the_newest_checkpoint(
    start_train: Start, precision: str
) -> None:
    run = start_train(*on_gpu(precision))
    run.wait_until(lambda: steps_done(run) >= 60 and run.events("checkpoint_committed"))
    os.kill(rank_pid(run, 0), signal.SIGKILL)
    run.wait()
    assert run.returncode == 0, run.output
    (restored,) = run.events("restored")
    committed = {event["step"] for event in run.events("checkpoint_committed")}
    assert restored["step"] in committed
    assert not run.events("checkpoint_failed")
    assert not run.events("checkpoint_rejected")
    assert len(column(run.run_dir, "loss")) == NUM_STEPS
    digest_of(run.run_dir)


def test_an_exception_loses_no_step(start_train: Start, tmp_path: Path) -> None:
    fault = faulty(fail_step=38, marker=tmp_path / "failed")
    run = start_train(*on_gpu(), *fault).wait()
    assert run.returncode == 0, run.output
    assert emergencies(run) == [(37, 0, True)]
    assert run.events("restored")[0]["step"] == 37
    assert run.read_json("summary.json")["lost_steps"] == 0
