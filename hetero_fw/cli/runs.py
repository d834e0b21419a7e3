"""Where a run stands, read from its directory while it runs or afterwards."""

from __future__ import annotations

import argparse
import fcntl
import json
from pathlib import Path
from typing import Any

from hetero_fw.monitoring import (
    EventName,
    RunDirectory,
    Status,
    read_events,
    read_metrics,
    read_status,
)


def run_directory(text: str) -> RunDirectory:
    """The run directory that an argument names."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {text}")
    run_dir = RunDirectory(path)
    if not (run_dir.plan_path.is_file() or run_dir.status_path.is_file()):
        raise argparse.ArgumentTypeError(f"{text} is not a run directory: it has no plan.json")
    return run_dir


def describe_run(run_dir: RunDirectory) -> dict[str, Any]:
    """Plain data about a run.

    Returns:
        status: as in `status.json`; INTERRUPTED if that says RUNNING but no process runs it.
        step, attempt, reason: as in `status.json`, the step from the newest row of metrics if that
            is further.
        loss, step_time_s: of that row.
        newest_checkpoint: directory name of the newest committed checkpoint.
        num_restarts: restarts so far.
        is_emulated: whether the devices are stood in for.
    """
    status = read_status(run_dir.status_path)
    rows = read_metrics(run_dir.metrics_path) if run_dir.metrics_path.is_file() else []
    row = rows[-1] if rows else {}
    events = read_events(run_dir.events_path) if run_dir.events_path.is_file() else []
    return {
        "run": str(run_dir.path),
        "status": _state(run_dir, status.status if status else None),
        "step": max(status.step if status else 0, int(row.get("step") or 0)),
        "attempt": status.attempt if status else 0,
        "reason": status.reason if status else "",
        "loss": row.get("loss"),
        "step_time_s": row.get("step_time_s"),
        "newest_checkpoint": _newest_checkpoint(run_dir.checkpoints_path, events),
        "num_restarts": sum(event.get("event") == EventName.RESTART for event in events),
        "is_emulated": _is_emulated(run_dir.plan_path),
    }


def format_run(description: dict[str, Any]) -> str:
    """A description as lines of text."""
    loss, step_time_s = description["loss"], description["step_time_s"]
    rows = {
        "run": description["run"],
        "status": " ".join(filter(None, [description["status"], description["reason"]])),
        "step": description["step"],
        "loss": None if loss is None else f"{loss:.4f}",
        "step time": None if step_time_s is None else f"{step_time_s:.3f} s",
        "checkpoint": description["newest_checkpoint"] or "none",
        "restarts": description["num_restarts"],
        "devices": "EMULATED" if description["is_emulated"] else None,
    }
    return "\n".join(f"{name:<11} {value}" for name, value in rows.items() if value is not None)


def _state(run_dir: RunDirectory, status: Status | None) -> str:
    if status is None:
        return "PLANNED"
    if status is Status.RUNNING and not _is_locked(run_dir.lock_path):
        return "INTERRUPTED"
    return status.value


def _is_locked(path: Path) -> bool:
    """Whether a process holds the run's lock. Asking does not disturb a run that wants it."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # No lock file, or a file system without locks: nothing speaks against status.json there.
        return path.exists()
    return False


def _newest_checkpoint(checkpoints: Path, events: list[dict[str, Any]]) -> str | None:
    names = [path.parent.name for path in checkpoints.glob("*/manifest.json")]
    committed = [
        str(event.get("path", ""))
        for event in events
        if event.get("event") == EventName.CHECKPOINT_COMMITTED
    ]
    # In a directory of a node, which this host may see.
    names += [Path(path).name for path in committed if Path(path).is_dir()]
    if not names:
        # They are kept elsewhere, then, and are not looked for there.
        names = [path.rpartition("/")[2] for path in committed]
    return max(names, default=None)


def _is_emulated(plan_path: Path) -> bool:
    try:
        plan = json.loads(plan_path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(plan, dict) and plan.get("emulation") is not None
