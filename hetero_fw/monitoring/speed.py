"""How fast each hardware group computed, from the plan and the measured steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from hetero_fw.monitoring.history import Row
from hetero_fw.monitoring.metrics import GROUP_COLUMN_PREFIX


def median_of(values: Sequence[float]) -> float | None:
    """The median, None of nothing."""
    return statistics.median(values) if values else None


def group_speeds(plan: Row, rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Predicted and measured speed of each hardware group of the plan, by its name.

    Returns:
        device, num_devices, num_samples: the group's devices and its share of the global batch.
        predicted_compute_s: of its slowest rank, by the plan.
        compute_s: the same measured, median over `rows`.
        samples_per_s: of the whole group while it computes.
        relative_speed: of one of its devices; the slowest group's is 1.
    """
    speeds = {group: _speed(ranks, group, rows) for group, ranks in _ranks_by_group(plan).items()}
    known = {
        group: speed["samples_per_s"] / speed["num_devices"]
        for group, speed in speeds.items()
        if speed["samples_per_s"]
    }
    for group, speed in speeds.items():
        speed["relative_speed"] = known[group] / min(known.values()) if group in known else None
    return speeds


def _ranks_by_group(plan: Row) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for rank in plan.get("ranks", ()):
        groups.setdefault(rank["group"], []).append(rank)
    return groups


def _speed(ranks: list[Row], group: str, rows: Sequence[Row]) -> dict[str, Any]:
    column = f"{GROUP_COLUMN_PREFIX}{group}"
    compute_s = median_of([row[column] for row in rows if row.get(column)])
    # The column holds the slowest rank's time, which computes the largest share of its group.
    largest_share = max(rank["num_samples"] for rank in ranks)
    return {
        "device": ranks[0]["device"],
        "num_devices": len(ranks),
        "num_samples": sum(rank["num_samples"] for rank in ranks),
        "predicted_compute_s": max(rank["compute_s"] for rank in ranks),
        "compute_s": compute_s,
        "samples_per_s": len(ranks) * largest_share / compute_s if compute_s else None,
    }
