"""Declared memory is a budget: what cannot fit is refused, what exceeds it fails for good."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.conftest import TrainRun
from tests.recovery.runs import faulty
from tests.recovery.test_kill import TINY

Train = Callable[..., TrainRun]


def test_plan_that_does_not_fit_is_refused(train: Train) -> None:
    run = train(*TINY, "parallel=uniform", "hardware.groups.v100.memory_gib=0.5")
    assert run.returncode == 2
    assert "v100" in run.output
    assert "GiB" in run.output
    assert "Traceback" not in run.output
    assert not run.run_dir.exists()


def test_auto_plan_leaves_out_what_is_too_small(train: Train) -> None:
    run = train(*TINY, "mode=plan", "hardware.groups.v100.memory_gib=0.5")
    assert run.returncode == 0
    plan = run.read_json("plan.json")
    assert {rank["group"] for rank in plan["ranks"]} == {"a100"}
    assert plan["idle_devices"] == ["v100-0/0", "v100-0/1"]
    assert not run.events("attempt_start")


def test_exceeding_the_budget_is_not_retried(train: Train) -> None:
    run = train(
        *TINY,
        *faulty(fault="allocate", fail_rank=3, fail_step=2),
        "hardware.groups.v100.memory_gib=2",
    )
    assert run.returncode == 1
    (failure,) = run.events("failure_detected")
    assert failure["failed_rank"] == 3
    assert failure["kind"] == "out_of_memory"
    assert not run.events("restart")
    assert run.read_json("status.json")["status"] == "FAILED"


def test_what_is_not_tried_again_is_kept_where_the_next_command_finds_it(
    start_train: Train, tmp_path: Path
) -> None:
    run = start_train(
        *TINY,
        *faulty(fault="allocate", fail_rank=3, fail_step=8),
        "hardware.groups.v100.memory_gib=2",
        "ckpt.interval_steps=20",
        f"ckpt.tiers.local={tmp_path}/nodes",
    ).wait()
    assert run.returncode == 1
    assert run.events("failure_detected")[0]["kind"] == "out_of_memory"
    (saved,) = run.events("emergency_save")
    assert (saved["step"], saved["asking_rank"], saved["is_saved"]) == (7, 3, True)
    kept = {(event["step"], event["tier"]) for event in run.events("checkpoint_committed")}
    assert kept == {(7, "local"), (7, "storage")}
