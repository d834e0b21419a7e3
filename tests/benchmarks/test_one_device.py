"""What the framework costs on one device: its step time against a bare PyTorch loop's."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.benchmarks.bare_loop import BareRun
from tests.benchmarks.figures import NUM_WARMUP_STEPS, median, show, steady_rows
from tests.conftest import REPOSITORY, TrainRun

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(900)]

NUM_STEPS = 45
NUM_TURNS = 3
TARGET_RATIO = 1.05
BATCH_SIZE = 56


def test_step_costs_little_more_than_a_bare_loop(
    train: Callable[..., TrainRun], run_dir: Path
) -> None:
    ours, bare = [], []
    for turn in range(NUM_TURNS):
        ours.append(_framework_step_s(train, run_dir, turn))
        bare.append(_bare_step_s())
    ratio = statistics.median(ours) / statistics.median(bare)
    show(
        f"train.py  {', '.join(f'{value:.4f}' for value in ours)} s",
        f"bare loop {', '.join(f'{value:.4f}' for value in bare)} s",
        f"ratio of medians {ratio:.3f}, of the fastest {min(ours) / min(bare):.3f} "
        f"(target {TARGET_RATIO})",
    )


def _framework_step_s(train: Callable[..., TrainRun], run_dir: Path, turn: int) -> float:
    # Declared, not probed: the comparison is about this CPU, also where there is a GPU.
    run = train(
        "hardware=single_gpu",
        "hardware.groups.gpu.device=cpu",
        f"data.global_batch_size={BATCH_SIZE}",
        f"trainer.max_steps={NUM_STEPS}",
        "ckpt=none",
        timeout_s=200.0,
    )
    assert run.returncode == 0, run.output
    rows = steady_rows(run_dir)
    run_dir.rename(run_dir.with_name(f"done-{turn}"))
    return median(rows, "step_time_s")


def _bare_step_s() -> float:
    command = [sys.executable, "-m", "tests.benchmarks.bare_loop", str(NUM_STEPS), str(BATCH_SIZE)]
    # train.py gives one rank all cores, whatever OMP_NUM_THREADS says.
    command.append(f"--threads={len(os.sched_getaffinity(0))}")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    run = BareRun(**json.loads(done.stdout))
    return statistics.median(run.step_times_s[NUM_WARMUP_STEPS:])
