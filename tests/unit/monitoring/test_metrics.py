from __future__ import annotations

import csv
import math
import time
from pathlib import Path

import pytest

from hetero_fw.monitoring import (
    MetricsWriter,
    ScalarWriter,
    StepRecord,
    last_step,
    read_metrics,
    read_scalars,
)

GROUPS = ("a100", "v100")


def record(step: int, loss: float = 0.1, groups: tuple[str, ...] = GROUPS) -> StepRecord:
    return StepRecord(
        step=step,
        loss=loss,
        grad_norm=None,
        lr=3e-4,
        num_samples=64,
        num_targets=640,
        step_time_s=0.5,
        memory_bytes=2**31,
        compute_s_by_group=dict.fromkeys(groups, 0.25),
        loss_scale=1024.0,
    )


def write(path: Path, steps: range, *, attempt: int = 0, resume_step: int = 0) -> None:
    writer = MetricsWriter(path, GROUPS, attempt=attempt, resume_step=resume_step)
    for step in steps:
        writer.write(record(step))
    writer.close()


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_metrics(path)]


def test_a_row_is_read_back_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    writer = MetricsWriter(path, GROUPS, attempt=3)
    writer.write(record(1, loss=1 / 3))
    [row] = read_metrics(path)  # visible before the writer is closed
    writer.close()
    assert time.time() - row.pop("time_s") < 60
    assert row == {
        "step": 1,
        "loss": 1 / 3,
        "grad_norm": None,
        "lr": 3e-4,
        "num_samples": 64,
        "num_targets": 640,
        "step_time_s": 0.5,
        "samples_per_s": 128.0,
        "memory_bytes": 2**31,
        "compute_s_a100": 0.25,
        "compute_s_v100": 0.25,
        "emulation_stretch": None,
        "loss_scale": 1024.0,
        "attempt": 3,
    }
    assert isinstance(row["step"], int)


def test_nan_survives(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.csv", GROUPS, attempt=0)
    writer.write(record(1, loss=math.nan))
    writer.close()
    assert math.isnan(read_metrics(tmp_path / "metrics.csv")[0]["loss"])


def test_resuming_drops_later_rows_and_keeps_them_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, range(1, 9))
    write(path, range(6, 8), attempt=1, resume_step=5)
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7]
    write(path, range(5, 6), attempt=2, resume_step=4)
    assert steps(path) == [1, 2, 3, 4, 5]
    lost = read_metrics(tmp_path / "metrics_lost.csv")
    assert [(row["step"], row["attempt"]) for row in lost] == [
        (6, 0), (7, 0), (8, 0), (5, 0), (6, 1), (7, 1),
    ]  # fmt: skip


def test_without_a_step_to_resume_from_the_table_starts_afresh(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, range(1, 4))
    write(path, range(1, 2), attempt=1)
    assert [(row["step"], row["attempt"]) for row in read_metrics(path)] == [(1, 1)]


@pytest.mark.parametrize("num_bytes", [1, 5, 40])
def test_a_torn_last_line_is_no_row(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "metrics.csv"
    write(path, range(1, 4))
    path.write_bytes(path.read_bytes()[:-num_bytes])
    assert steps(path) == [1, 2]
    assert last_step(path) == 2
    write(path, range(3, 5), attempt=1, resume_step=3)
    assert steps(path) == [1, 2, 3, 4]


def test_a_torn_header_is_an_empty_table(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss")
    assert read_metrics(path) == []
    write(path, range(1, 3))
    assert steps(path) == [1, 2]


def test_other_groups_add_columns(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, range(1, 3))
    writer = MetricsWriter(path, ("h100",), attempt=1, resume_step=2)
    writer.write(record(3, groups=("h100",)))
    writer.close()
    first, _, third = read_metrics(path)
    assert (first["compute_s_a100"], first["compute_s_h100"]) == (0.25, None)
    assert (third["compute_s_a100"], third["compute_s_h100"]) == (None, 0.25)


def test_the_file_is_plain_csv(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    writer = MetricsWriter(path, ('odd "name", here',), attempt=0)
    writer.write(record(1, groups=('odd "name", here',)))
    writer.close()
    with path.open(newline="") as file:
        [row] = csv.DictReader(file)
    assert row['compute_s_odd "name", here'] == "0.25"


def test_last_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    assert last_step(path) == 0
    MetricsWriter(path, GROUPS, attempt=0).close()
    assert last_step(path) == 0
    write(path, range(1, 400))
    assert last_step(path) == 399


def test_scalars_add_columns_when_they_appear(tmp_path: Path) -> None:
    path = tmp_path / "validation.csv"
    writer = ScalarWriter(path, attempt=0)
    writer.write(10, {"val_loss": 2.0})
    writer.write(20, {"val_accuracy": 0.5, "val_loss": 1.0, "step": 99.0})
    writer.close()
    first, second = read_scalars(path)
    assert (first["val_loss"], first["val_accuracy"]) == (2.0, None)
    assert (second["step"], second["val_loss"], second["val_accuracy"]) == (20, 1.0, 0.5)
    writer = ScalarWriter(path, attempt=1, resume_step=10)
    writer.close()
    assert [row["step"] for row in read_scalars(path)] == [10]
    assert not (tmp_path / "validation_lost.csv").exists()


def test_rows_come_back_where_the_run_goes_on_from_a_later_step_after_all(tmp_path: Path) -> None:
    path, lost = tmp_path / "metrics.csv", tmp_path / "metrics_lost.csv"
    write(path, range(1, 10))
    write(path, range(6, 8), attempt=1, resume_step=5)
    assert steps(lost) == [6, 7, 8, 9]
    write(path, range(9, 11), attempt=2, resume_step=8)
    rows = [(row["step"], row["attempt"]) for row in read_metrics(path)]
    assert rows == [*((n, 0) for n in range(1, 6)), (6, 1), (7, 1), (8, 0), (9, 2), (10, 2)]
    assert steps(lost) == [6, 7, 9]
    write(path, range(41, 42), attempt=3, resume_step=40)  # of which nobody knows anything
    assert steps(path) == [*range(1, 11), 41]
