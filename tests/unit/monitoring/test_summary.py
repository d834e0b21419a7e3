from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_fw.monitoring import (
    RunDirectory,
    RunHistory,
    Status,
    build_summary,
    read_history,
    summarize,
    write_summary,
)

WriteRun = Callable[[], RunDirectory]


def test_the_figures_of_a_run_with_one_failure(write_run: WriteRun, plan: dict[str, Any]) -> None:
    run = write_run()
    summary = build_summary(run, plan_dict=plan, weights_digest="abc", status=Status.DONE)
    assert summary["run_name"] == "short-run"
    assert summary["status"] == "DONE"
    assert summary["weights_digest"] == "abc"
    # 4 steps of 1 s and 40 samples count; the run took from 100 s to 110 s.
    assert summary["steps"] == 4
    assert summary["num_samples"] == 160
    assert (summary["first_loss"], summary["last_loss"]) == (10.0, 2.5)
    assert summary["validation"] == {"step": 4, "val_loss": 2.25, "val_accuracy": 0.75}
    assert summary["wall_time_s"] == pytest.approx(10.0)
    assert summary["goodput"] == pytest.approx(0.4)
    assert summary["samples_per_s"] == pytest.approx(40.0)
    assert summary["samples_per_s_mean"] == pytest.approx(40.0)
    assert summary["samples_per_s_wall"] == pytest.approx(16.0)
    assert summary["peak_memory_bytes"] == 2**30
    # Killed at 105.5 s, step 3 complete again at 108.5 s.
    assert (summary["num_attempts"], summary["num_failures"], summary["num_restarts"]) == (2, 1, 1)
    assert summary["recovery_s"] == pytest.approx([3.0])
    assert summary["lost_steps"] == 2
    # The first stall is the slower rank's time to staging, the second was measured.
    assert summary["num_checkpoints"] == 2
    assert summary["checkpoint_stall_s"] == pytest.approx([0.2, 0.3])
    assert summary["emulated"] is True
    assert summary["emulation"]["stretch"] == pytest.approx(1.1)
    assert summary["predicted_step_s"] == 0.8
    assert summary["measured_step_s"] == 1.0
    assert summary["step_time_ratio"] == pytest.approx(1.25)
    fast, slow = summary["groups"]["fast"], summary["groups"]["slow"]
    assert fast["samples_per_s"] == pytest.approx(25 / 0.8)
    assert slow["samples_per_s"] == pytest.approx(15 / 0.75)
    assert fast["relative_speed"] == pytest.approx(25 / 0.8 / (15 / 0.75))
    assert slow["relative_speed"] == 1.0


def test_the_summary_file_is_strict_json(write_run: WriteRun, plan: dict[str, Any]) -> None:
    run = write_run()
    summary = build_summary(run, plan_dict=None, weights_digest=None, status="FAILED", reason="x")
    assert summary["predicted_step_s"] == plan["step_s"]
    write_summary(run, summary | {"last_loss": float("nan")})
    read = json.loads(run.summary_path.read_text())
    assert (read["status"], read["reason"], read["last_loss"]) == ("FAILED", "x", "nan")


def test_a_run_without_anything_has_a_summary(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    summary = build_summary(run, plan_dict=None, weights_digest=None, status=Status.FAILED)
    assert summary["steps"] == 0
    assert summary["emulated"] is False
    assert summary["groups"] == {}
    assert (summary["recovery_s"], summary["checkpoint_stall_s"]) == ([], [])
    for name in ("samples_per_s", "goodput", "wall_time_s", "first_loss", "step_time_ratio"):
        assert summary[name] is None


def without(history: RunHistory, *names: str) -> RunHistory:
    return replace(history, events=tuple(e for e in history.events if e["event"] not in names))


def with_events(history: RunHistory, *events: dict[str, Any]) -> RunHistory:
    return replace(history, events=(*history.events, *events))


def recovery_s(history: RunHistory) -> list[float]:
    found = summarize(history, weights_digest=None, status="DONE")["recovery_s"]
    assert isinstance(found, list)
    return found


def test_recovery_starts_at_the_injected_fault(write_run: WriteRun) -> None:
    history = read_history(write_run())
    injected = {"time_s": 105.25, "attempt": 0, "rank": 1, "event": "failure_injected"}
    first = replace(history, events=(injected, *history.events))
    assert recovery_s(first) == pytest.approx([3.25])


def test_several_reports_of_one_failure_count_once(write_run: WriteRun) -> None:
    history = read_history(write_run())
    again = {"time_s": 106.5, "attempt": 0, "rank": None, "event": "failure_detected"}
    assert recovery_s(with_events(history, again)) == pytest.approx([3.0])


def test_a_failure_that_nothing_came_after_was_not_recovered_from(write_run: WriteRun) -> None:
    history = read_history(write_run())
    last = {"time_s": 110.5, "attempt": 1, "rank": None, "event": "failure_detected"}
    assert recovery_s(with_events(history, last)) == pytest.approx([3.0])


def test_continuing_by_hand_is_no_recovery(write_run: WriteRun) -> None:
    history = read_history(write_run())
    end = {"time_s": 106.2, "attempt": 0, "rank": None, "event": "run_end"}
    assert recovery_s(with_events(history, end)) == []


def test_recovery_counts_steps_that_were_lost_again(write_run: WriteRun) -> None:
    history = read_history(write_run())
    lost = {**history.steps[-1], "time_s": 107.75, "step": 3, "attempt": 1}
    history = replace(history, lost_steps=(*history.lost_steps, lost))
    assert recovery_s(history) == pytest.approx([2.25])


def test_a_step_that_the_failing_attempt_still_wrote_is_no_recovery(write_run: WriteRun) -> None:
    history = read_history(write_run())
    late = {**history.lost_steps[-1], "time_s": 105.6, "step": 5}
    history = replace(history, lost_steps=(*history.lost_steps, late))
    assert recovery_s(history) == pytest.approx([3.0])


def test_the_measured_step_is_that_of_the_newest_plan(
    write_run: WriteRun, plan: dict[str, Any]
) -> None:
    run = write_run()
    run.attempt_plan_path(0).write_text(json.dumps({**plan, "step_s": 9.0}))
    text = run.metrics_path.read_text().replace(",40,400,1.0,", ",40,400,5.0,", 2)
    run.metrics_path.write_text(text)
    summary = build_summary(run, plan_dict=plan, weights_digest=None, status="DONE")
    assert summary["measured_step_s"] == 1.0


def test_skipped_steps_are_counted_once_for_all_ranks(write_run: WriteRun) -> None:
    history = read_history(write_run())
    skips = [
        {"time_s": 109.0, "attempt": 1, "rank": rank, "step": step, "event": "step_skipped"}
        for rank in (0, 1)
        for step in (None, None, 4)
    ]
    summary = summarize(with_events(history, *skips), weights_digest=None, status="DONE")
    assert summary["skipped_steps"] == 3


def test_rows_moved_twice_are_lost_once(write_run: WriteRun) -> None:
    run = write_run()
    text = run.lost_metrics_path.read_text()
    run.lost_metrics_path.write_text(text + text.split("\n", 1)[1])
    assert len(read_history(run).lost_steps) == 2


def test_without_starts_the_clock_runs_from_the_first_event(write_run: WriteRun) -> None:
    history = without(read_history(write_run()), "attempt_start")
    summary = summarize(history, weights_digest=None, status="DONE")
    assert summary["wall_time_s"] == pytest.approx(110.0 - 102.4)


def test_what_a_run_that_ended_early_had_not_saved_is_lost(
    write_run: WriteRun, plan: dict[str, Any]
) -> None:
    history = read_history(write_run(), plan)
    row = {**history.steps[-1], "time_s": 110.5}
    history = replace(history, steps=(*history.steps, {**row, "step": 5}, {**row, "step": 6}))

    def lost_with(status: Status, history: RunHistory) -> tuple[int, float]:
        summary = summarize(history, weights_digest=None, status=status)
        return summary["lost_steps"], summary["goodput"] * summary["wall_time_s"]

    # Steps 3 and 4 were lost by the failure; step 4 was saved again, and nothing after it.
    assert lost_with(Status.PREEMPTED, history) == (4, pytest.approx(4.0))
    assert lost_with(Status.FAILED, history) == (4, pytest.approx(4.0))
    assert lost_with(Status.RUNNING, history) == (2, pytest.approx(6.0))
    assert lost_with(Status.DONE, history) == (2, pytest.approx(6.0))
    events = tuple(e for e in history.events if e["event"] != "checkpoint_committed")
    restored_only = replace(history, events=events)
    assert lost_with(Status.PREEMPTED, restored_only) == (6, pytest.approx(2.0))
