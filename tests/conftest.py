"""Fixtures that several suites share: ports, run directories, and `train.py` as a bounded process.

`train("trainer.max_steps=3")` runs to the end; `start_train(...)` returns at once, for tests that
kill something on the way. Both give every process they start a marker in its environment, and the
test fails if one of them is alive when it ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

# One thread per process: tests start several ranks on few cores. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

REPOSITORY = Path(__file__).resolve().parent.parent
MARKER = "HETERO_TEST_MARKER"
LEAVE_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class TrainRun:
    """One `train.py`: a session of its own, its output in a file, its processes found by marker."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    output_path: Path
    marker: str = field(repr=False)

    @property
    def returncode(self) -> int | None:
        return self.process.poll()

    @property
    def output(self) -> str:
        """Standard output and standard error together, as printed so far."""
        return self.output_path.read_text(errors="replace")

    def wait(self, timeout_s: float = 100.0) -> TrainRun:
        """Wait for the end; kill everything and fail after `timeout_s`."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"train.py ran over {timeout_s:.0f} s:\n{self.output[-4000:]}")
        return self

    def wait_until(self, condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
        """Poll `condition` until it is true; fail if the run ends or `timeout_s` passes first."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            has_ended = self.returncode is not None
            if (has_ended and not condition()) or time.monotonic() > deadline:
                status = f"exit status {self.returncode}"
                pytest.fail(f"the awaited moment did not come, {status}:\n{self.output[-4000:]}")
            time.sleep(0.02)

    def processes(self) -> list[psutil.Process]:
        """Every live process of this run, supervisor included; zombies do not count."""
        return [process for process in psutil.process_iter() if _carries(process, self.marker)]

    def kill(self) -> None:
        """SIGKILL every process of this run."""
        for process in self.processes():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.wait(LEAVE_TIMEOUT_S)

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Complete lines of events.jsonl, all or those called `name`."""
        path = self.run_dir / "events.jsonl"
        text = path.read_text() if path.exists() else ""
        complete = text[: text.rfind("\n") + 1]
        events = [json.loads(line) for line in complete.splitlines()]
        return [event for event in events if name in (None, event["event"])]

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON file of the run directory, for example `summary.json`."""
        content: dict[str, Any] = json.loads((self.run_dir / name).read_text())
        return content


def _carries(process: psutil.Process, marker: str) -> bool:
    try:
        is_alive = process.status() != psutil.STATUS_ZOMBIE
        return is_alive and bool(process.environ().get(MARKER) == marker)
    except psutil.Error:
        return False


def _assert_nothing_left(run: TrainRun) -> None:
    deadline = time.monotonic() + LEAVE_TIMEOUT_S
    while (left := run.processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        run.kill()
        pytest.fail(f"processes outlived train.py: {[process.pid for process in left]}")


@pytest.fixture
def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The run directory of `train` and `start_train`; a run creates it."""
    return tmp_path / "outputs" / "run"


@pytest.fixture
def start_train(tmp_path: Path, run_dir: Path) -> Iterator[Callable[..., TrainRun]]:
    """Start `python train.py <overrides>` in `run_dir`; repeated calls continue the same run."""
    runs: list[TrainRun] = []

    def start(*overrides: str, env: dict[str, str] | None = None) -> TrainRun:
        marker = uuid.uuid4().hex
        output_path = tmp_path / f"output-{len(runs)}.txt"
        command = [sys.executable, str(REPOSITORY / "train.py")]
        command += [f"paths.root={run_dir.parent}", f"run_name={run_dir.name}", *overrides]
        with output_path.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=tmp_path,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), MARKER: marker},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        run = TrainRun(process=process, run_dir=run_dir, output_path=output_path, marker=marker)
        runs.append(run)
        return run

    yield start
    for run in runs:
        if run.returncode is None:
            run.kill()
    for run in runs:
        _assert_nothing_left(run)


@pytest.fixture
def train(start_train: Callable[..., TrainRun]) -> Callable[..., TrainRun]:
    """Run `python train.py <overrides>` to its end and return the finished run."""

    def run_to_end(*overrides: str, timeout_s: float = 100.0, **options: Any) -> TrainRun:
        return start_train(*overrides, **options).wait(timeout_s)

    return run_to_end


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch sees no CUDA device."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def _no_gcsfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if gcsfs were not installed, whatever has been imported before."""
    client = "hetero_fw.checkpoint.google_storage"
    loaded = [name for name in sys.modules if name.startswith("gcsfs.")]
    for name in ("gcsfs", *loaded):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, client, raising=False)
    monkeypatch.delattr(client, raising=False)
