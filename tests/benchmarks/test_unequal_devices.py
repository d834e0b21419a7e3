"""What a split by speed gains over the equal split, and how well plans predict step times."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hetero_fw.planning import ParallelPlan
from tests.benchmarks.figures import column_median, show, steady_rows
from tests.conftest import TrainRun

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

NUM_STEPS = 30
NUM_TURNS = 2
TARGET_GAIN = 1.66
TARGET_ERROR = 0.05

Train = Callable[..., TrainRun]


@dataclass(frozen=True, kw_only=True)
class SplitRun:
    """The steady steps of one run and the plan it followed."""

    plan: ParallelPlan
    rows: list[dict[str, Any]]

    @classmethod
    def of(cls, run_dir: Path) -> SplitRun:
        plan = ParallelPlan.from_dict(json.loads((run_dir / "plan.json").read_text()))
        return cls(plan=plan, rows=steady_rows(run_dir))

    @property
    def step_s(self) -> float:
        return column_median(self.rows, "step_time_s")

    @property
    def samples_per_s(self) -> float:
        return column_median(self.rows, "samples_per_s")

    def speeds(self) -> dict[str, float]:
        """Samples per second of computing of one device of each group, as measured."""
        return {
            rank.group: rank.num_samples / column_median(self.rows, f"compute_s_{rank.group}")
            for rank in self.plan.ranks
        }

    def planned_speeds(self) -> dict[str, float]:
        return {rank.group: rank.num_samples / rank.compute_s for rank in self.plan.ranks}

    def line(self, name: str) -> str:
        error = self.step_s / self.plan.step_s - 1
        return (
            f"{name:<8} {self.samples_per_s:7.1f} samples/s  step {self.step_s:.4f} s  "
            f"predicted {self.plan.step_s:.4f} s  error {error:+.1%}  "
            f"stretch {column_median(self.rows, 'emulation_stretch'):.3f}"
        )

    def speed_line(self, name: str) -> str:
        fast, slow = self.speeds().values()
        planned_fast, planned_slow = self.planned_speeds().values()
        error = (fast / slow) / (planned_fast / planned_slow) - 1
        return (
            f"{name:<8} relative speed {fast / slow:.3f} : 1  "
            f"planned {planned_fast / planned_slow:.3f} : 1  error {error:+.1%}"
        )


def test_split_by_speed_beats_the_equal_split(train: Train, run_dir: Path) -> None:
    hardware = (
        "hardware=a100_v100_mix",
        f"hardware.emulation.dilation={_dilation(train, run_dir)}",
    )
    runs: dict[str, list[SplitRun]] = {"uniform": [], "auto": []}
    for _ in range(NUM_TURNS):
        for parallel, done in runs.items():
            done.append(_measure(train, run_dir, *hardware, f"parallel={parallel}"))
    turns = zip(runs["uniform"], runs["auto"], strict=True)
    gains = [fast.samples_per_s / slow.samples_per_s for slow, fast in turns]
    ideal = runs["uniform"][0].plan.step_s / runs["auto"][0].plan.step_s
    show(
        *(run.line(name) for name, done in runs.items() for run in done),
        *(run.speed_line(name) for name, done in runs.items() for run in done),
        f"auto / uniform: {', '.join(f'{gain:.3f}' for gain in gains)}; median "
        f"{statistics.median(gains):.3f} x (target {TARGET_GAIN}, planned {ideal:.3f})",
        f"targets for the errors: {TARGET_ERROR:.0%}",
    )


def _dilation(train: Train, run_dir: Path) -> float:
    """Probe the machine once: both splits have to be emulated at one pace."""
    run = train("hardware=a100_v100_mix", "mode=plan")
    assert run.returncode == 0, run.output
    dilation = float(run.read_json("plan.json")["emulation"]["dilation"])
    run_dir.rename(run_dir.with_name("probe"))
    return dilation


def _measure(train: Train, run_dir: Path, *overrides: str) -> SplitRun:
    run = train(f"trainer.max_steps={NUM_STEPS}", "ckpt=none", *overrides, timeout_s=400.0)
    assert run.returncode == 0, run.output
    measured = SplitRun.of(run_dir)
    # The next run starts afresh under the same name.
    run_dir.rename(run_dir.with_name(f"done-{len(list(run_dir.parent.iterdir()))}"))
    return measured
