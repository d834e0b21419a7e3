"""`metrics.csv`, one row for each optimizer step, and scalar tables such as `validation.csv`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero_fw.monitoring.csv_table import Cell, CsvTable, read_table
from hetero_fw.monitoring.step_record import StepRecord

GROUP_COLUMN_PREFIX = "compute_s_"
_FIRST_COLUMNS = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "num_samples",
    "num_targets",
    "step_time_s",
    "samples_per_s",
    "memory_bytes",
)
_LAST_COLUMNS = ("emulation_stretch", "loss_scale", "time_s", "attempt")
_TAIL_BYTES = 16384
_INTEGER_COLUMNS = frozenset({"step", "num_samples", "num_targets", "memory_bytes", "attempt"})


class MetricsWriter:
    """Writes `metrics.csv`. Rank 0 only; a row costs some 10 us and is in the file on return.

    Args:
        path: `metrics.csv` of the run.
        groups: names of the hardware groups, each with a column `compute_s_<group>`.
        attempt: number of the attempt that writes.
        resume_step: the step training continues from. Rows of later steps move to
            `metrics_lost.csv` beside the file: that work is done again. 0 starts afresh.
    """

    def __init__(
        self, path: Path, groups: Sequence[str], *, attempt: int, resume_step: int = 0
    ) -> None:
        group_columns = [f"{GROUP_COLUMN_PREFIX}{group}" for group in groups]
        columns = (*_FIRST_COLUMNS, *group_columns, *_LAST_COLUMNS)
        path = Path(path)
        self._table = CsvTable(
            path,
            columns,
            resume_step=resume_step,
            lost_path=path.with_name(f"{path.stem}_lost{path.suffix}"),
        )
        self._attempt = attempt

    def write(self, record: StepRecord) -> None:
        """Append one step. Every group of `record` needs a column, given by `groups`."""
        row: dict[str, Cell] = {
            "step": record.step,
            "loss": record.loss,
            "grad_norm": record.grad_norm,
            "lr": record.lr,
            "num_samples": record.num_samples,
            "num_targets": record.num_targets,
            "step_time_s": record.step_time_s,
            "samples_per_s": record.samples_per_s,
            "memory_bytes": record.memory_bytes,
            "emulation_stretch": record.emulation_stretch,
            "loss_scale": record.loss_scale,
            "time_s": time.time(),
            "attempt": self._attempt,
        }
        for group, compute_s in record.compute_s_by_group.items():
            row[f"{GROUP_COLUMN_PREFIX}{group}"] = compute_s
        self._table.append(row)

    def close(self) -> None:
        """Close the file. Harmless when called twice."""
        self._table.close()


class ScalarWriter:
    """Writes scalars that do not come with every step, such as `val_loss`, to their own table.

    Args:
        path: the file, for example `validation.csv`.
        attempt: number of the attempt that writes.
        resume_step: rows of later steps are dropped.

    The file has the columns step, time_s and attempt, then one for each name, added when the name
    appears.
    """

    def __init__(self, path: Path, *, attempt: int, resume_step: int = 0) -> None:
        self._table = CsvTable(path, ("step", "time_s", "attempt"), resume_step=resume_step)
        self._attempt = attempt

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append one row; a scalar that is not given stays empty."""
        cells: dict[str, Cell] = {name: float(value) for name, value in scalars.items()}
        self._table.append({**cells, "step": step, "time_s": time.time(), "attempt": self._attempt})

    def close(self) -> None:
        """Close the file. Harmless when called twice."""
        self._table.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows with numbers for cells and None for empty ones. A torn last line is left out."""
    rows = read_table(path)[1]
    return [{name: _number(name, cell) for name, cell in row.items()} for row in rows]


def read_scalars(path: Path) -> list[dict[str, Any]]:
    """The same for a table of `ScalarWriter`."""
    return read_metrics(path)


def last_step(path: Path) -> int:
    """Step of the last whole row, 0 if there is none. Costs the same however long the file is."""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            tail = file.read()
    except FileNotFoundError:
        return 0
    for line in reversed(tail[: tail.rfind(b"\n") + 1].splitlines()):
        step = line.split(b",", 1)[0]
        if step.isdigit():
            return int(step)
    return 0


def _number(name: str, cell: str) -> float | int | None:
    if not cell:
        return None
    try:
        return int(cell) if name in _INTEGER_COLUMNS else float(cell)
    except ValueError:
        return None
