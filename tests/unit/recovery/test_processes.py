"""Processes are watched by descriptor and ended whatever state they are in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_fw.recovery.processes import Watched, kill_all, rank_pid, wait_any


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    found = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield found
    for process in found:
        process.kill()
        process.wait(10)


def test_end_is_seen_before_anybody_waits_for_the_zombie(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    watched = Watched(sleepers[0].pid)
    assert not watched.has_ended
    sleepers[0].kill()
    wait_any([watched], [], 10.0)
    assert watched.has_ended
    watched.close()
    assert watched.has_ended


def test_process_that_is_gone_already(sleepers: list[subprocess.Popen[bytes]]) -> None:
    sleepers[0].kill()
    sleepers[0].wait(10)
    watched = Watched(sleepers[0].pid)
    assert watched.has_ended
    watched.send(signal.SIGTERM)
    assert kill_all([watched], 0.0) == []
    watched.close()


def test_send(sleepers: list[subprocess.Popen[bytes]]) -> None:
    watched = Watched(sleepers[0].pid)
    watched.send(signal.SIGTERM)
    assert sleepers[0].wait(10) == -signal.SIGTERM
    watched.send(signal.SIGTERM)
    watched.close()


def test_kill_all_ends_a_stopped_process_too(sleepers: list[subprocess.Popen[bytes]]) -> None:
    sleepers[1].send_signal(signal.SIGSTOP)
    watched = [Watched(process.pid) for process in sleepers]
    assert kill_all(watched, 10.0) == []
    assert [process.wait(10) for process in sleepers] == [-signal.SIGKILL] * 2
    for item in watched:
        item.close()


def test_wait_returns_at_the_end_of_time(sleepers: list[subprocess.Popen[bytes]]) -> None:
    watched = Watched(sleepers[0].pid)
    began_s = time.monotonic()
    wait_any([watched], [], 0.05)
    assert time.monotonic() - began_s >= 0.04
    watched.close()


def test_wait_returns_when_a_descriptor_is_ready() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"x")
    began_s = time.monotonic()
    wait_any([], [reader], 30.0)
    assert time.monotonic() - began_s < 20.0
    os.close(reader)
    os.close(writer)


def test_rank_pid(tmp_path: Path) -> None:
    assert rank_pid(tmp_path / "0.pid") is None
    (tmp_path / "0.pid").write_text(f"{sys.maxsize}\n")
    assert rank_pid(tmp_path / "0.pid") == sys.maxsize
