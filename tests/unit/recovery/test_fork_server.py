"""The fork server of a run: who starts processes from it, and which signals end it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY

# A child starts a grandchild; both say which process they were forked from, and how SIGTERM
# finds them.
PROGRAM = """
import multiprocessing, os, signal, sys
from hetero_fw.recovery.fork_server import start_fork_server, share_fork_server

def child(queue, depth):
    queue.put((depth, os.getppid(), signal.getsignal(signal.SIGTERM) is signal.SIG_IGN))
    if depth:
        share_fork_server()
        process = multiprocessing.get_context("forkserver").Process(
            target=child, args=(queue, depth - 1)
        )
        process.start()
        process.join()

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: None)
    start_fork_server(["json"])
    assert callable(signal.getsignal(signal.SIGTERM)), "this process listens again"
    context = multiprocessing.get_context("forkserver")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue, 1))
    process.start()
    process.join()
    (_, server, first), (_, other, second) = queue.get(), queue.get()
    print(server == other != os.getpid(), first, second)
"""


def test_all_processes_come_from_one_server_and_ignore_stop_signals(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["True", "True", "True"], done.stderr
