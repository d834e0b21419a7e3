"""A rank that beats is alive; one that falls silent is noticed, however clocks are set."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hetero_fw.recovery import Heartbeat
from hetero_fw.recovery.heartbeat import Silence

WAIT_S = 20.0
LONGEST_GAP_S = 2.0


def beats(path: Path, since_ns: int) -> bool:
    """Whether the time stamp moves on within a generous time."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        if path.stat().st_mtime_ns > since_ns:
            return True
        time.sleep(0.005)
    return False


def test_heart_beats_until_it_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "ranks" / "0.heartbeat"
    heartbeat = Heartbeat(path, 0.02)
    heartbeat.start()
    assert beats(path, path.stat().st_mtime_ns)
    heartbeat.stop()
    last_ns = path.stat().st_mtime_ns
    time.sleep(0.1)
    assert path.stat().st_mtime_ns == last_ns


def test_heart_survives_a_vanished_folder(tmp_path: Path) -> None:
    path = tmp_path / "ranks" / "0.heartbeat"
    heartbeat = Heartbeat(path, 0.01)
    heartbeat.start()
    path.unlink()
    path.parent.rename(tmp_path / "away")
    time.sleep(0.05)
    (tmp_path / "away").rename(path.parent)
    path.touch()
    assert beats(path, path.stat().st_mtime_ns)
    heartbeat.stop()


def test_silence_grows_and_a_beat_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "0.heartbeat"
    path.touch()
    silence = Silence(path)
    assert silence.look() == 0.0
    time.sleep(0.05)
    assert silence.look() >= 0.05
    time.sleep(0.05)
    assert silence.look() >= 0.1
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert silence.look() == 0.0


def test_old_time_stamp_is_no_silence(tmp_path: Path) -> None:
    # As after a suspended laptop wakes up, or where a file server's clock is behind.
    path = tmp_path / "0.heartbeat"
    path.touch()
    os.utime(path, (1.0, 1.0))
    silence = Silence(path)
    assert silence.look() == 0.0
    assert silence.look() <= LONGEST_GAP_S


def test_silence_before_the_first_beat(tmp_path: Path) -> None:
    pid_path = tmp_path / "0.pid"
    pid_path.touch()
    silence = Silence(pid_path, tmp_path / "0.heartbeat")
    assert silence.look() == 0.0
    time.sleep(0.03)
    assert silence.look() >= 0.03


def test_nothing_to_look_at(tmp_path: Path) -> None:
    silence = Silence(tmp_path / "none")
    assert 0.0 <= silence.look() <= LONGEST_GAP_S
