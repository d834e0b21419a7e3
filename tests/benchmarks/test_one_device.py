"""What the framework costs on one device: its step time against a bare PyTorch loop's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from statistics import median

import pytest

from tests.benchmarks.bare_loop import BareRun
from tests.benchmarks.figures import NUM_WARMUP_STEPS, show, steady_rows
from tests.conftest import REPOSITORY, TrainRun

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

NUM_STEPS = 45
NUM_TURNS = 3
TARGET_RATIO = 1.05
BATCH_SIZE = 56


def test_step_costs_little_more_than_a_bare_loop(
    train: Callable[..., TrainRun], run_dir: Path
) -> None:
    ours: list[list[float]] = []
    bare: list[list[float]] = []
    for turn in range(NUM_TURNS):
        ours.append(_framework_steps_s(train, run_dir, turn))
        bare.append(_bare_steps_s())
    our_medians_s, bare_medians_s = list(map(median, ours)), list(map(median, bare))
    ratio = median(our_medians_s) / median(bare_medians_s)
    # Other load only ever adds time, so that the fastest steps tell the most on a busy machine.
    fastest_ratio = min(chain(*ours)) / min(chain(*bare))
    show(
        f"train.py  {', '.join(f'{value:.4f}' for value in our_medians_s)} s a step",
        f"bare loop {', '.join(f'{value:.4f}' for value in bare_medians_s)} s a step",
        f"ratio {ratio:.3f} (target {TARGET_RATIO}); of the fastest steps {fastest_ratio:.3f}",
    )


def _framework_steps_s(train: Callable[..., TrainRun], run_dir: Path, turn: int) -> list[float]:
    # Declared, not probed: the comparison is about this CPU, also where there is a GPU.
    run = train(
        "hardware=single_gpu",
        "hardware.groups.gpu.device=cpu",
        f"data.global_batch_size={BATCH_SIZE}",
        f"trainer.max_steps={NUM_STEPS}",
        "ckpt=none",
        timeout_s=400.0,
    )
    assert run.returncode == 0, run.output
    rows = steady_rows(run_dir)
    run_dir.rename(run_dir.with_name(f"done-{turn}"))
    return [float(row["step_time_s"]) for row in rows]


def _bare_steps_s() -> list[float]:
    command = [sys.executable, "-m", "tests.benchmarks.bare_loop", str(NUM_STEPS), str(BATCH_SIZE)]
    # train.py gives one rank all cores, whatever OMP_NUM_THREADS says.
    command.append(f"--threads={len(os.sched_getaffinity(0))}")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    run = BareRun(**json.loads(done.stdout))
    return run.step_times_s[NUM_WARMUP_STEPS:]
