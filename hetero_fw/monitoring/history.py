"""Everything a run directory says about a run, read once, as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero_fw.monitoring.events import read_events
from hetero_fw.monitoring.metrics import read_metrics, read_scalars
from hetero_fw.monitoring.rundir import RunDirectory

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """What happened, in the order in which it was written.

    Attributes:
        events: of all processes and attempts.
        steps: rows of `metrics.csv`: one for each step that counts.
        lost_steps: rows of steps that were computed and then lost by going back to a checkpoint.
        validation: rows of `validation.csv`.
        plan: the newest plan as a dict, empty if there is none.
        plan_attempts: the attempts that ran under that plan; None: all of them.
    """

    events: tuple[Row, ...] = ()
    steps: tuple[Row, ...] = ()
    lost_steps: tuple[Row, ...] = ()
    validation: tuple[Row, ...] = ()
    plan: Row = field(default_factory=dict)
    plan_attempts: frozenset[int] | None = None

    @property
    def steps_of_plan(self) -> tuple[Row, ...]:
        """Rows measured under the newest plan, or all if there is none of them yet."""
        chosen = self.plan_attempts
        rows = tuple(row for row in self.steps if chosen is None or row["attempt"] in chosen)
        return rows or self.steps


def read_history(run_dir: RunDirectory, plan: Row | None = None) -> RunHistory:
    """Read whatever is there; missing files count as empty.

    Args:
        run_dir: the run to read.
        plan: the newest plan as a dict; read from `plan.json` if None.
    """
    plan = _read_json(run_dir.plan_path) if plan is None else plan
    same_plan = frozenset(
        attempt
        for attempt in run_dir.attempt_numbers()
        if _read_json(run_dir.attempt_plan_path(attempt)) == plan
    )
    return RunHistory(
        events=tuple(read_events(run_dir.events_path)),
        steps=tuple(_complete(read_metrics(run_dir.metrics_path))),
        lost_steps=tuple(_distinct(_complete(read_metrics(run_dir.lost_metrics_path)))),
        validation=tuple(read_scalars(run_dir.validation_path)),
        plan=plan,
        plan_attempts=same_plan or None,
    )


def _complete(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the cells that everything else is computed from."""
    needed = ("time_s", "attempt", "step_time_s", "num_samples")
    return [row for row in rows if all(row.get(name) is not None for name in needed)]


def _distinct(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A kill while rows are moved can move them twice."""
    return list({(row["attempt"], row["step"], row["time_s"]): row for row in rows}.values())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
