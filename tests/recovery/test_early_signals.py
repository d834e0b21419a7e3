"""Signals before the run listens to them itself."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TrainRun
from tests.recovery.runs import PAIR

Start = Callable[..., TrainRun]


def has_in_mask(run: TrainRun, mask: str, number: signal.Signals) -> bool:
    """Whether the kernel has `number` in a mask of the process: SigCgt or SigIgn."""
    lines = Path(f"/proc/{run.process.pid}/status").read_text().splitlines()
    text = next((line for line in lines if line.startswith(f"{mask}:")), f"{mask}: 0")
    return bool(int(text.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_one_that_comes_first_of_all_ends_the_process_with_one_line(
    start_train: Start, number: signal.Signals
) -> None:
    run = start_train(*PAIR)
    run.wait_until(lambda: has_in_mask(run, "SigCgt", number))
    run.process.send_signal(number)
    run.wait()
    assert run.returncode == 75, run.output
    assert run.output == "stopped before training began; run it again\n"
    assert not run.run_dir.exists()


def test_one_that_asks_for_a_save_before_there_is_anything_to_save(start_train: Start) -> None:
    saves = "callbacks.emergency_save.save_signals=[SIGUSR1]"
    run = start_train(*PAIR, saves, "trainer.max_steps=2")
    # It is ignored for a moment, which a busy machine may miss, and listened to from then on.
    run.wait_until(
        lambda: has_in_mask(run, "SigIgn", signal.SIGUSR1) or bool(run.events("attempt_start"))
    )
    run.process.send_signal(signal.SIGUSR1)
    run.wait()
    assert run.returncode == 0, run.output
