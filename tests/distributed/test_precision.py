"""Mixed precision on two unequal ranks, and what happens to a gradient that is not finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.conftest import TrainRun
from tests.recovery.runs import column, faulty

Train = Callable[..., TrainRun]

TWO_RANKS = (
    "hardware.emulation.dilation=2000",
    "model.module.model_dim=32",
    "model.module.num_layers=2",
    "data.sequence_length=16",
    "trainer.max_steps=12",
    "monitor=none",
)
A100_V100 = (
    "hardware=a100_v100_mix",
    "hardware.groups.a100.devices_per_node=1",
    "hardware.groups.v100.devices_per_node=1",
)
H100_A100 = (
    "hardware=h100_a100_mix",
    "hardware.groups.h100.devices_per_node=1",
    "hardware.groups.a100.devices_per_node=1",
)


def test_bfloat16_learns_without_a_scale(train: Train) -> None:
    run = train(*H100_A100, *TWO_RANKS, "parallel.precision=bf16-mixed", "ckpt=none")
    assert run.returncode == 0, run.output
    assert run.read_json("plan.json")["compute_precision"] == "bf16-mixed"
    losses = [float(text) for text in column(run.run_dir, "loss")]
    assert losses[-1] < losses[0] - 0.2
    assert set(column(run.run_dir, "loss_scale")) == {""}


def test_float16_skips_an_overflow_and_keeps_its_scale(train: Train, tmp_path: Path) -> None:
    # Rank 1 overflows at step 3; rank 0 fails once at step 7, after the checkpoint of step 5.
    run = train(
        *A100_V100,
        *TWO_RANKS,
        *faulty(fault="overflow", fail_rank=1, fail_step=3),
        "+callbacks.breaks._target_=tests.recovery.modules.BreakOnce",
        "callbacks.breaks.step=7",
        f"callbacks.breaks.marker={tmp_path / 'broken'}",
        "parallel.precision=16-mixed",
        "ckpt=fixed",
        "ckpt.interval_steps=5",
    )
    assert run.returncode == 0, run.output
    assert run.read_json("plan.json")["compute_precision"] == "16-mixed"
    assert run.events("restored")[0]["step"] == 5

    skipped = run.events("step_skipped")
    assert {(event["rank"], event["step"]) for event in skipped} == {(0, 3), (1, 3)}
    assert len(skipped) == 2
    assert run.read_json("summary.json")["skipped_steps"] == 1

    scales = [float(text) for text in column(run.run_dir, "loss_scale")]
    assert scales[:2] == [2.0**16] * 2
    assert scales[3:] == [2.0**15] * 9
    losses = [float(text) for text in column(run.run_dir, "loss")]
    assert losses[-1] < losses[0] - 0.2
    norms = [float(text) for text in column(run.run_dir, "grad_norm")]
    assert [number for number, norm in enumerate(norms, 1) if not norm < float("inf")] == [3]


def test_precision_that_a_device_lacks_is_refused(train: Train) -> None:
    run = train(*A100_V100, *TWO_RANKS, "parallel.precision=bf16-mixed")
    assert run.returncode == 2
    assert "v100" in run.output
    assert "bf16-mixed" in run.output
