"""The kernel ends a process whose starter is gone, even if it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import REPOSITORY

# A starter of one child through a fork server; the child notes its pid and does nothing.
PROGRAM = """
import multiprocessing, os, pathlib, sys, time
from hetero_fw.recovery.lifeline import die_with_parent

def child(path):
    die_with_parent()
    temporary = pathlib.Path(path + ".tmp")
    temporary.write_text(str(os.getpid()))
    temporary.rename(path)
    time.sleep(60)

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=child, args=(sys.argv[1],))
    process.start()
    process.join()
"""


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_for(path: Path) -> int:
    deadline_s = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline_s, "the child did not start"
        time.sleep(0.01)
    return int(path.read_text())


@pytest.mark.parametrize("is_stopped", [False, True])
def test_child_dies_with_its_starter(tmp_path: Path, is_stopped: bool) -> None:
    script = tmp_path / "starter.py"
    script.write_text(PROGRAM)
    starter = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "pid")],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    try:
        child = psutil.Process(wait_for(tmp_path / "pid"))
        assert is_alive(child)
        if is_stopped:
            child.send_signal(signal.SIGSTOP)
        starter.send_signal(signal.SIGKILL)
        starter.wait(10)
        deadline_s = time.monotonic() + 10
        while is_alive(child) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        has_died = not is_alive(child)
        if not has_died:
            child.kill()
        assert has_died
    finally:
        starter.kill()
        starter.wait(10)
