"""What the benchmarks share: medians over the steps of a run, and how they are printed."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero_fw.monitoring import read_metrics

# The first steps of a process fill caches and allocate memory.
NUM_WARMUP_STEPS = 5


def steady_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of `metrics.csv` after the first few steps."""
    return read_metrics(run_dir / "metrics.csv")[NUM_WARMUP_STEPS:]


def column_median(rows: Sequence[Mapping[str, Any]], column: str) -> float:
    return statistics.median(float(row[column]) for row in rows)


def spread(values: Sequence[float]) -> str:
    """Smallest, median and largest of some times."""
    if not values:
        return "none"
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"min {low:.2f}  median {middle:.2f}  max {high:.2f} s"


def show(*lines: str) -> None:
    """Print lines set off from pytest's own, with how busy the machine is."""
    load = os.getloadavg()[0]
    print("", *lines, f"cores {len(os.sched_getaffinity(0))}, load {load:.1f}", sep="\n  ")
