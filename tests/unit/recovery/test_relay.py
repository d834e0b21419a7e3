"""What the ranks get of the signals that reach the supervisor."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hetero_fw.recovery.processes import Watched
from hetero_fw.recovery.relay import SignalRelay
from hetero_fw.recovery.stop import SaveRequest, StopRequest

SAVES = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: print("saves", flush=True))
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[str]]:
    """A process that goes on after SIGTERM, as a rank does until it has saved."""
    process = subprocess.Popen([sys.executable, "-c", SAVES], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_ranks_save_until_an_interrupt_is_given_again(rank: subprocess.Popen[str]) -> None:
    stop, watched = StopRequest(), Watched(rank.pid)
    relay = SignalRelay(stop, SaveRequest(), grace_s=1000.0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        stop._note(number, None)
        relay.forward([watched])
    assert rank.stdout is not None
    assert rank.stdout.readline() == "saves\n"
    assert rank.poll() is None
    stop.is_insisted_on = True
    relay.forward([watched])
    assert rank.wait(10.0) == -signal.SIGKILL
    watched.close()
