"""Loader workers must not outlive the rank, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

SCRIPT = """
import sys
from hetero_fw.data import RankPart, build_train_loader

if __name__ == "__main__":
    part = RankPart(shares=(2,), rank=0, microbatches=(2,))
    loader = build_train_loader(list(range(64)), seed=1, part=part, max_steps=1000, num_workers=2)
    batches = iter(loader)
    next(batches)
    print("ready", flush=True)
    sys.stdin.readline()
"""


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    def is_alive(process: psutil.Process) -> bool:
        try:
            return bool(process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    return [process for process in processes if is_alive(process)]


@pytest.mark.parametrize("ending", ["end", "kill"])
def test_workers_leave_with_their_rank(tmp_path: Path, ending: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(SCRIPT)
    rank = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    family: list[psutil.Process] = []
    try:
        assert rank.stdout is not None
        assert rank.stdin is not None
        assert rank.stdout.readline() == "ready\n"
        family = psutil.Process(rank.pid).children(recursive=True)
        assert len(family) >= 3, "a fork server and two workers"
        if ending == "kill":
            rank.send_signal(signal.SIGKILL)
        else:
            rank.stdin.write("\n")
            rank.stdin.flush()
        assert rank.wait(30) == (0 if ending == "end" else -signal.SIGKILL)
        deadline = time.monotonic() + 10
        while alive(family) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not alive(family)
    finally:
        for process in [*alive(family), rank]:
            process.kill()
        rank.communicate()
