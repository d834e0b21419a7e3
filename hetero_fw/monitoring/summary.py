"""`summary.json`: what a run achieved and what its failures cost, in figures."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hetero_fw.monitoring.atomic_file import write_json_atomically
from hetero_fw.monitoring.events import EventName
from hetero_fw.monitoring.history import Row, RunHistory, read_history
from hetero_fw.monitoring.incidents import (
    checkpoint_stalls_s,
    count,
    failure_times_s,
    recovery_times_s,
)
from hetero_fw.monitoring.lineage import saves_on_line
from hetero_fw.monitoring.rundir import RunDirectory
from hetero_fw.monitoring.saves import num_committed_saves, quarantined_steps, saves_by_tier
from hetero_fw.monitoring.speed import group_speeds, median_of
from hetero_fw.monitoring.status import Status
from hetero_fw.policies import Tier


def build_summary(
    run_dir: RunDirectory,
    *,
    plan_dict: Mapping[str, Any] | None,
    weights_digest: str | None,
    status: Status | str,
    reason: str = "",
) -> dict[str, Any]:
    """Read the run directory and summarize it; see `summarize`.

    Args:
        run_dir: the run.
        weights_digest: hash of all parameters at the end, None if it is not known.
        status: how the run ended.
        reason: one sentence or nothing.
        plan_dict: the newest plan; read from `plan.json` if None.
    """
    history = read_history(run_dir, plan_dict)
    return {
        "run_name": run_dir.name,
        **summarize(history, weights_digest=weights_digest, status=status, reason=reason),
        "written_s": time.time(),
    }


def write_summary(run_dir: RunDirectory, summary: Mapping[str, Any]) -> None:
    """Replace `summary.json` in one step."""
    write_json_atomically(run_dir.summary_path, summary)


def summarize(
    history: RunHistory, *, weights_digest: str | None, status: Status | str, reason: str = ""
) -> dict[str, Any]:
    """Figures of a run. Figures that the history does not support are None, lists are empty.

    Returns:
        steps: steps that count, the last one's number.
        samples_per_s: at the median step; `samples_per_s_mean` over the time spent on steps that
            count; `samples_per_s_wall` over the wall time.
        goodput: share of the wall time that went into steps that count.
        wall_time_s: from the first event to the last sign of life, starting up included.
        num_restarts: restarts without help; `num_attempts` counts runs by hand as well.
        recovery_s: for each failure that was recovered from without help, seconds from it to the
            next completed step.
        num_checkpoints: committed ones; `checkpoint_stall_s` has for each save, also one that
            failed, the seconds that training stood still. What went to several tiers counts once.
        checkpoint_tiers: for each tier what `TierSaves` says; `num_failed_saves` is of all of them.
        num_writer_restarts: of the processes that write checkpoints.
        quarantined_steps: of checkpoints that were passed over because training diverges after
            them.
        lost_steps: steps that were computed and then lost; also those after the newest checkpoint
            of a run that has ended before its time.
        measured_step_s: median under the newest plan; `step_time_ratio` divides it by the plan's
            prediction `predicted_step_s`. `predicted_uniform_step_s` is what the plan expects of
            the stock equal split.
        groups: for each hardware group what `group_speeds` says.
    """
    unsaved = _unsaved_steps(history, Status(status))
    return {
        "status": Status(status).value,
        "reason": reason,
        **_progress(history),
        **_throughput(history, unsaved),
        **_incidents(history, unsaved),
        **_plan_facts(history),
        "weights_digest": weights_digest,
    }


def _unsaved_steps(history: RunHistory, status: Status) -> tuple[Row, ...]:
    """Steps that a run which has ended before its time will compute again when it continues."""
    if status not in (Status.PREEMPTED, Status.FAILED):
        return ()
    saved = [event for tier in Tier for event in saves_on_line(history.events, tier)]
    restored = [event for event in history.events if event["event"] == EventName.RESTORED]
    safe_step = max((event["step"] for event in (*saved, *restored[-1:])), default=0)
    return tuple(row for row in history.steps if row["step"] > safe_step)


def _progress(history: RunHistory) -> dict[str, Any]:
    rows = history.steps
    losses = [row.get("loss") for row in rows]
    last_validation = history.validation[-1] if history.validation else {}
    return {
        "steps": rows[-1]["step"] if rows else 0,
        "num_samples": sum(row["num_samples"] for row in rows),
        "first_loss": losses[0] if rows else None,
        "last_loss": losses[-1] if rows else None,
        "validation": {
            name: value
            for name, value in last_validation.items()
            if name not in {"time_s", "attempt"} and value is not None
        },
    }


def _throughput(history: RunHistory, unsaved: Sequence[Row]) -> dict[str, Any]:
    rows = history.steps
    wall_s = wall_time_s(history)
    spent_s = sum(row["step_time_s"] for row in rows)
    kept_s = spent_s - sum(row["step_time_s"] for row in unsaved)
    num_samples = sum(row["num_samples"] for row in rows)
    rates = [row["num_samples"] / row["step_time_s"] for row in rows if row["step_time_s"] > 0]
    return {
        "samples_per_s": median_of(rates),
        "samples_per_s_mean": num_samples / spent_s if spent_s else None,
        "samples_per_s_wall": num_samples / wall_s if wall_s else None,
        "goodput": min(1.0, kept_s / wall_s) if wall_s else None,
        "wall_time_s": wall_s,
        "peak_memory_bytes": max((row.get("memory_bytes") or 0 for row in rows), default=None),
    }


def _incidents(history: RunHistory, unsaved: Sequence[Row]) -> dict[str, Any]:
    attempts = {event.get("attempt") for event in _starts(history)}
    tiers = saves_by_tier(history.events)
    return {
        "num_attempts": len(attempts),
        "num_failures": len(failure_times_s(history.events)),
        "num_restarts": count(history.events, EventName.RESTART),
        "recovery_s": recovery_times_s(history),
        "num_checkpoints": num_committed_saves(history.events),
        "checkpoint_stall_s": checkpoint_stalls_s(history.events),
        "checkpoint_tiers": {tier: asdict(saves) for tier, saves in tiers.items()},
        "num_failed_saves": sum(saves.num_failed for saves in tiers.values()),
        "num_writer_restarts": sum(
            event["event"] == EventName.WRITER_RESTART for event in history.events
        ),
        "quarantined_steps": quarantined_steps(history.events),
        "lost_steps": len(history.lost_steps) + len(unsaved),
        "skipped_steps": count(history.events, EventName.STEP_SKIPPED),
    }


def _plan_facts(history: RunHistory) -> dict[str, Any]:
    plan = history.plan
    emulation = plan.get("emulation")
    predicted_s = plan.get("step_s")
    rows = history.steps_of_plan
    measured_s = median_of([row["step_time_s"] for row in rows])
    facts: dict[str, Any] = {
        "emulated": emulation is not None,
        "emulation": dict(emulation) if emulation else None,
        "predicted_step_s": predicted_s,
        "measured_step_s": measured_s,
        "step_time_ratio": measured_s / predicted_s if measured_s and predicted_s else None,
        "predicted_uniform_step_s": plan.get("uniform_step_s"),
        "world_size": len(plan.get("ranks", ())),
        "groups": group_speeds(plan, rows),
    }
    if emulation:
        stretches = [row["emulation_stretch"] for row in rows if row.get("emulation_stretch")]
        facts["emulation"]["stretch"] = median_of(stretches)
    return facts


def wall_time_s(history: RunHistory) -> float | None:
    """From the first event, before any process has started, to the last thing written."""
    if not history.events:
        return None
    rows: tuple[Row, ...] = (*history.events, *history.steps, *history.lost_steps)
    start_s = min(event["time_s"] for event in history.events)
    return float(max(row["time_s"] for row in rows) - start_s)


def _starts(history: RunHistory) -> list[Row]:
    return [event for event in history.events if event["event"] == EventName.ATTEMPT_START]
