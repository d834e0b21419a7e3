"""A row for each step, with what all ranks reported."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from hetero_fw.callbacks import StepRecorder
from hetero_fw.monitoring import MetricsWriter, ScalarWriter, StepPrinter
from tests.unit.callbacks.examples import Source, Trainer, report, result


def recorder_for(source: Source, folder: Path) -> StepRecorder:
    return StepRecorder(
        source=source,
        metrics=MetricsWriter(folder / "metrics.csv", ["a100", "v100"], attempt=2),
        scalars=ScalarWriter(folder / "validation.csv", attempt=2),
        printer=StepPrinter("lines", 10, 1),
    )


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_row_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = [
        report(compute_s=seconds, memory_bytes=memory)
        for seconds, memory in ((0.5, 10.0), (0.75, 40.0), (0.25, 20.0), (0.125, 30.0))
    ]
    source = Source(finished_step=result(reports), loss_scale=1024.0)
    recorder = recorder_for(source, tmp_path)
    trainer: Any = Trainer()
    module: Any = None
    recorder.on_train_start(trainer, module)
    recorder.on_train_batch_start(trainer, module, None, 0)
    trainer.global_step = 1
    # The rate of the next step is no part of this row.
    trainer.optimizers[0].param_groups[0]["lr"] = 99.0
    recorder.on_train_batch_end(trainer, module, None, None, 0)
    recorder.teardown(trainer, module, "fit")

    (row,) = rows(tmp_path / "metrics.csv")
    expected = {
        "step": 1,
        "loss": 2.0,
        "grad_norm": 3.0,
        "lr": 0.25,
        "num_samples": 64,
        "num_targets": 640,
        "memory_bytes": 40,
        "compute_s_a100": 0.75,
        "compute_s_v100": 0.25,
        "emulation_stretch": 1.25,
        "loss_scale": 1024.0,
        "attempt": 2,
    }
    assert {name: float(row[name]) for name in expected} == expected
    assert float(row["step_time_s"]) > 0.0
    assert "1/10" in capsys.readouterr().out


def test_row_of_a_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = recorder_for(Source(), tmp_path)
    trainer: Any = Trainer(global_step=5, callback_metrics={"val_loss": 0.5, "train_loss": 1.0})
    module: Any = None
    recorder.on_validation_end(trainer, module)
    recorder.teardown(trainer, module, "fit")
    assert "train_loss" not in (tmp_path / "validation.csv").read_text()
    assert "val_loss" in (tmp_path / "validation.csv").read_text()
    assert "val_loss 0.5000" in capsys.readouterr().out
