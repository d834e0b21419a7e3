"""How long a job stands still when a rank is killed: this framework and stock torchrun."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetero_fw.monitoring import read_metrics
from tests.benchmarks.figures import show, spread
from tests.benchmarks.killing import (
    NUM_KILLS,
    NUM_RANKS,
    START_TIMEOUT_S,
    STEPS_BETWEEN_KILLS,
    Recovery,
    StepMark,
    kill_rank,
)
from tests.conftest import MARKER, REPOSITORY, TrainRun

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

NUM_STEPS = STEPS_BETWEEN_KILLS * (NUM_KILLS + 1)
SAVE_INTERVAL_STEPS = 5
BATCH_SIZE, SEQUENCE_LENGTH, NUM_LAYERS, MODEL_DIM = 56, 64, 2, 64
SIZE = (
    f"data.global_batch_size={BATCH_SIZE}",
    f"data.sequence_length={SEQUENCE_LENGTH}",
    f"model.module.num_layers={NUM_LAYERS}",
    f"model.module.model_dim={MODEL_DIM}",
)
TARGET_S = 3.0
# torchrun then keeps no store between restarts (github.com/pytorch/pytorch #135712, #167288).
UNSHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(frozen=True)
class FrameworkJob:
    """`train.py`; it numbers its attempts itself."""

    run: TrainRun

    def marks(self) -> list[StepMark]:
        path = self.run.run_dir / "metrics.csv"
        return [
            StepMark(attempt=row["attempt"], step=row["step"], time_s=row["time_s"])
            for row in (read_metrics(path) if path.exists() else [])
        ]

    def pid(self, attempt: int, rank: int) -> int:
        return int((self.run.run_dir / f"attempts/{attempt}/ranks/{rank}.pid").read_text())

    def has_ended(self) -> bool:
        return self.run.returncode is not None

    def phases(self, recovery: Recovery) -> dict[str, float]:
        """Seconds from the kill until it was noticed, until all ranks had started, and so on."""
        moments = {
            name: max(
                (event["time_s"] for event in self.run.events(name) if event["attempt"] == attempt),
                default=recovery.killed_time_s,
            )
            for name, attempt in (
                ("failure_detected", recovery.attempt),
                ("attempt_start", recovery.next_attempt),
                ("restored", recovery.next_attempt),
            )
        }
        return {name: time_s - recovery.killed_time_s for name, time_s in moments.items()}


class StockJob:
    """`stock_loop.py` under torchrun, started again when torchrun itself gives up."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self._folder = folder
        self._env = env
        self.num_launches = 0
        self.run = self.launch()

    def launch(self) -> TrainRun:
        """Start torchrun; its ranks continue from the newest checkpoint."""
        marker = uuid.uuid4().hex
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={NUM_RANKS}", f"--max-restarts={NUM_KILLS}"]
        command += [str(Path(__file__).with_name("stock_loop.py")), str(self._folder)]
        command += [f"--launch={self.num_launches}", f"--steps={NUM_STEPS}"]
        command += [f"--save-interval={SAVE_INTERVAL_STEPS}", f"--batch-size={BATCH_SIZE}"]
        command += [f"--sequence-length={SEQUENCE_LENGTH}", f"--num-layers={NUM_LAYERS}"]
        command += [f"--model-dim={MODEL_DIM}"]
        paths = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        output_path = self._folder / f"output-{self.num_launches}.txt"
        with output_path.open("wb") as output:
            process = subprocess.Popen(
                command,
                env={**os.environ, **paths, **self._env, MARKER: marker},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.num_launches += 1
        self.run = TrainRun(
            process=process, run_dir=self._folder, output_path=output_path, marker=marker
        )
        return self.run

    def marks(self) -> list[StepMark]:
        path = self._folder / "steps.csv"
        text = path.read_text() if path.exists() else ""
        rows = [line.split(",") for line in text[: text.rfind("\n") + 1].splitlines()]
        return [
            StepMark(
                attempt=(NUM_KILLS + 1) * int(launch) + int(restart),
                step=int(step),
                time_s=float(time_s),
            )
            for launch, restart, step, time_s in rows
        ]

    def pid(self, attempt: int, rank: int) -> int:
        launch, restart = divmod(attempt, NUM_KILLS + 1)
        return int((self._folder / f"{launch}-{restart}-{rank}.pid").read_text())

    def has_ended(self) -> bool:
        return self.run.returncode is not None


@pytest.fixture(scope="module")
def framework_line() -> list[str]:
    """The framework's figures once they are known, to print beside torchrun's."""
    return []


def test_framework_is_back_in_seconds(
    start_train: Callable[..., TrainRun], framework_line: list[str]
) -> None:
    run = start_train(
        "hardware=a100_v100_mix",
        *SIZE,
        f"trainer.max_steps={NUM_STEPS}",
        "ckpt=fixed",
        f"ckpt.interval_steps={SAVE_INTERVAL_STEPS}",
    )
    job = FrameworkJob(run)
    recoveries = [kill_rank(job, index) for index in range(NUM_KILLS)]
    run.wait()
    assert run.returncode == 0, run.output
    times_s = [item.recovery_s for item in recoveries if item.recovery_s is not None]
    assert len(times_s) == NUM_KILLS
    phases = [job.phases(item) for item in recoveries]
    framework_line.append(
        f"train.py: {len(times_s)} of {NUM_KILLS} restarts came back; kill to next step "
        f"{spread(times_s)} (target median {TARGET_S:.0f} s)"
    )
    show(
        *framework_line,
        ", ".join(f"{value:.2f}" for value in times_s),
        "median since the kill: "
        + ", ".join(
            f"{name} {statistics.median(phase[name] for phase in phases):.2f} s"
            for name in phases[0]
        ),
    )


def test_an_exception_loses_no_step(
    start_train: Callable[..., TrainRun], tmp_path: Path, framework_line: list[str]
) -> None:
    run = start_train(
        "hardware=a100_v100_mix",
        *SIZE,
        "model.module._target_=tests.recovery.modules.RaisingGPT",
        f"+model.module.interval_steps={STEPS_BETWEEN_KILLS}",
        f"+model.module.folder={tmp_path}",
        f"trainer.max_steps={NUM_STEPS}",
        "ckpt=fixed",
        f"ckpt.interval_steps={NUM_STEPS}",  # so that nothing else saves on the way
    ).wait(600.0)
    assert run.returncode == 0, run.output
    marks = FrameworkJob(run).marks()
    assert [mark.step for mark in marks] == list(range(1, NUM_STEPS + 1))
    pauses_s = [
        after.time_s - before.time_s
        for before, after in itertools.pairwise(marks)
        if after.attempt > before.attempt
    ]
    lost_steps = run.read_json("summary.json")["lost_steps"]
    show(
        *framework_line,
        f"train.py: {len(pauses_s)} exceptions, {lost_steps} steps computed again; from the last "
        f"step before to the first after {spread(pauses_s)}",
    )
    assert len(pauses_s) == NUM_STEPS // STEPS_BETWEEN_KILLS
    assert lost_steps == 0


@pytest.mark.parametrize("env", [{}, UNSHARED_STORE], ids=["default", "unshared_store"])
def test_stock_torchrun(tmp_path: Path, env: dict[str, str], framework_line: list[str]) -> None:
    job = StockJob(tmp_path, env)
    times_s: list[float] = []
    num_failed = num_lost = 0
    try:
        for index in range(NUM_KILLS):
            recovery = kill_rank(job, index)
            if recovery.recovery_s is None or recovery.next_attempt is None:
                num_lost += 1
                job.run.kill()
                job.launch()
                continue
            times_s.append(recovery.recovery_s)
            num_failed += recovery.next_attempt - recovery.attempt - 1
    finally:
        job.run.kill()
    show(
        *framework_line,
        " ".join([f"torchrun --max-restarts={NUM_KILLS}", *(f"{k}={v}" for k, v in env.items())])
        + f": {len(times_s)} of {NUM_KILLS} kills recovered from (after {num_failed} failed "
        f"restarts), {num_lost} without a step for {START_TIMEOUT_S:.0f} s; kill to next step "
        f"{spread(times_s)}",
        ", ".join(f"{value:.2f}" for value in times_s),
    )
