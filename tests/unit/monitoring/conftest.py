"""A short run written by hand: two attempts, one failure, two steps lost, two checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero_fw.monitoring import RunDirectory

HEADER = (
    "step,loss,grad_norm,lr,num_samples,num_targets,step_time_s,samples_per_s,memory_bytes,"
    "compute_s_fast,compute_s_slow,emulation_stretch,loss_scale,time_s,attempt\n"
)


def step_row(step: int, time_s: float, attempt: int, step_time_s: float = 1.0) -> str:
    """One line of `metrics.csv`: 40 samples in each step, the loss is 10 / step."""
    return (
        f"{step},{10 / step},1.5,0.001,40,400,{step_time_s},{40 / step_time_s},{2**30},"
        f"0.8,0.75,1.1,,{time_s},{attempt}\n"
    )


def rank_plan(rank: int, group: str, num_samples: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "node": f"{group}-0",
        "node_index": 0,
        "local_rank": 0,
        "device": f"{group}-device",
        "group": group,
        "num_samples": num_samples,
        "microbatches": [num_samples // 2, num_samples - num_samples // 2],
        "compute_s": 0.8,
        "required_bytes": 3 * 2**30,
        "budget_bytes": 12 * 2**30,
    }


@pytest.fixture
def plan() -> dict[str, Any]:
    return {
        "kind": "fsdp",
        "global_batch_size": 40,
        "ranks": [rank_plan(0, "fast", 25), rank_plan(1, "slow", 15)],
        "step_s": 0.8,
        "uniform_step_s": 1.2,
        "reasons": ["shares follow speed & memory"],
        "emulation": {
            "dilation": 3000.0,
            "host_flops_per_s": 3e10,
            "declared_step_s": 0.0003,
        },
    }


def _event(time_s: float, attempt: int, rank: int | None, event: str, **fields: Any) -> str:
    record = {"time_s": time_s, "attempt": attempt, "rank": rank, "step": None, "event": event}
    return json.dumps(record | fields) + "\n"


EVENTS = "".join(
    [
        _event(100.0, 0, 0, "attempt_start", pid=1, node="fast-0"),
        _event(100.1, 0, 1, "attempt_start", pid=2, node="slow-0"),
        _event(102.4, 0, 0, "checkpoint_started", step=2),
        _event(102.4, 0, 1, "checkpoint_started", step=2),
        _event(102.5, 0, 0, "checkpoint_staged", step=2),
        _event(102.6, 0, 1, "checkpoint_staged", step=2),
        _event(102.9, 0, 0, "checkpoint_committed", step=2),
        _event(
            106.0,
            0,
            None,
            "failure_detected",
            step=4,
            failed_rank=1,
            failed_time_s=105.5,
            detail="<killed> & gone",
        ),
        _event(106.0, 0, None, "attempt_end", outcome="failed"),
        _event(106.1, 0, None, "restart", step=4, reason="transient"),
        _event(107.0, 1, 0, "attempt_start", pid=3, node="fast-0"),
        _event(107.0, 1, 1, "attempt_start", pid=4, node="slow-0"),
        _event(107.5, 1, 0, "restored", step=2, source="checkpoints/x"),
        _event(107.5, 1, 1, "restored", step=2, source="checkpoints/x"),
        _event(109.8, 1, 0, "checkpoint_committed", step=4, stall_s=0.3),
        _event(110.0, 1, None, "attempt_end", outcome="done"),
        _event(110.0, 1, None, "run_end", step=4, status="DONE"),
    ]
)
STEPS = HEADER + "".join(
    [step_row(1, 101.0, 0), step_row(2, 102.0, 0), step_row(3, 108.5, 1), step_row(4, 109.5, 1)]
)
LOST_STEPS = HEADER + step_row(3, 104.0, 0) + step_row(4, 105.0, 0)
VALIDATION = "step,time_s,attempt,val_loss,val_accuracy\n2,102.1,0,4.5,0.25\n4,109.6,1,2.25,0.75\n"


@pytest.fixture
def write_run(tmp_path: Path, plan: dict[str, Any]) -> Callable[[], RunDirectory]:
    """Write that run and return its directory."""

    def write() -> RunDirectory:
        run = RunDirectory(tmp_path / "short-run")
        run.path.mkdir()
        run.events_path.write_text(EVENTS)
        run.metrics_path.write_text(STEPS)
        run.lost_metrics_path.write_text(LOST_STEPS)
        run.validation_path.write_text(VALIDATION)
        run.plan_path.write_text(json.dumps(plan))
        for attempt in (0, 1):
            run.attempt_path(attempt).mkdir(parents=True)
            run.attempt_plan_path(attempt).write_text(json.dumps(plan))
        return run

    return write
