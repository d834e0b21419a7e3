"""The end of training: it may come early, and nobody waits until checkpoints were read back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from hetero_fw.checkpoint import list_checkpoints, read_back
from hetero_fw.checkpoint.manifest import FileEntry
from hetero_fw.checkpoint.read_back import GoOn
from hetero_fw.checkpoint.shard_file import FileHash
from tests.conftest import TrainRun
from tests.recovery.runs import PAIR, digest_of, undisturbed

COLLECTIVE_S = 6.0
READING_S = 10.0


class SlowReading(pl.Callback):
    """From a step on rank 0 takes long to read the next files back; `marker` says it began."""

    def __init__(self, *, step: int, marker: str, num_files: int = 1) -> None:
        self._step = step
        self._num_files = num_files
        self._marker = Path(marker)
        self._read = read_back.verify_further
        self._ends_s: dict[Any, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_rank == 0 and trainer.global_step == self._step:
            read_back.verify_further = self._read_slowly

    def _read_slowly(self, found: FileHash, file: FileEntry, go_on: GoOn) -> bool:
        if found.path not in self._ends_s and len(self._ends_s) < self._num_files:
            self._ends_s[found.path] = time.monotonic() + READING_S
            self._marker.touch()
        while time.monotonic() < self._ends_s.get(found.path, 0.0):
            time.sleep(0.1)
            if not go_on():
                return False
        return self._read(found, file, go_on)


class EndsEarly(pl.Callback):
    """Ends training after a step, and leaves other weights behind than those that were trained."""

    def __init__(self, *, step: int) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        trainer.should_stop = trainer.global_step == self._step

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.should_stop:
            for parameter in pl_module.parameters():
                parameter.detach().zero_()


def slow(tmp_path: Path, mode: str, step: int, num_files: int = 1) -> tuple[str, ...]:
    return (
        *PAIR,
        "ckpt.keep_latest_k=2",
        f"ckpt.async_mode={mode}",  # in the rank's own process, where this test can slow it down
        f"+callbacks.slow._target_={__name__}.SlowReading",
        f"+callbacks.slow.step={step}",
        f"+callbacks.slow.marker={tmp_path}/reading",
        f"+callbacks.slow.num_files={num_files}",
    )


# Of the saves at 6, 12, 18 and 24 the third is the first that makes another one superfluous.
@pytest.mark.parametrize(("mode", "step"), [("async", 24), ("disabled", 18), ("disabled", 24)])
def test_other_ranks_do_not_wait_in_a_collective(
    train: Callable[..., TrainRun], tmp_path: Path, mode: str, step: int
) -> None:
    run = train(
        *slow(tmp_path, mode, step),
        f"recovery.process_group_timeout_s={COLLECTIVE_S}",
        "recovery.heartbeat_interval_s=1.5",
    )
    assert run.returncode == 0, run.output
    assert (tmp_path / "reading").exists()
    assert not run.events("failure_detected")
    infos = list_checkpoints(run.run_dir / "checkpoints", "hetero_ckpt")
    assert [infos[0].step, len(infos)] == [24, 2]
    assert digest_of(run.run_dir) == digest_of(undisturbed(tmp_path / "plain", *PAIR))


def test_a_run_that_is_to_stop_leaves_the_rest_to_the_next_attempt(
    start_train: Callable[..., TrainRun], tmp_path: Path
) -> None:
    long = "trainer.max_steps=2000"
    command = slow(tmp_path, "async", 18, num_files=100)
    run = start_train(*command, long)
    run.wait_until((tmp_path / "reading").exists)
    os.kill(run.process.pid, signal.SIGTERM)
    began_s = time.monotonic()
    run.wait()
    assert time.monotonic() - began_s < 30.0
    assert run.returncode == 75, run.output
    assert "were not removed" not in run.output
    root = run.run_dir / "checkpoints"
    stopped = list_checkpoints(root, "hetero_ckpt")
    assert len(stopped) > 2
    last_step = stopped[0].step + 12
    again = start_train(*command[:-4], f"trainer.max_steps={last_step}").wait()
    assert again.returncode == 0, again.output
    assert again.events("restored")[0]["step"] == stopped[0].step
    infos = list_checkpoints(root, "hetero_ckpt")
    assert [infos[0].step, len(infos)] == [last_step, 2]


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_last_step_is_safe_ends_the_run_as_done(
    start_train: Callable[..., TrainRun], tmp_path: Path, signal_number: int
) -> None:
    run = start_train(*slow(tmp_path, "async", 24, num_files=100))
    run.wait_until((tmp_path / "reading").exists)
    time.sleep(6.0)
    os.kill(run.process.pid, signal_number)
    began_s = time.monotonic()
    run.wait()
    assert time.monotonic() - began_s < 30.0
    assert run.returncode == 0, run.output
    assert "step 24 is safe" in run.output
    assert "older checkpoints go once newer ones are read back" in run.output
    assert run.read_json("status.json")["status"] == "DONE"


def test_training_that_a_callback_ends_is_done_and_its_last_step_saved(
    start_train: Callable[..., TrainRun], tmp_path: Path
) -> None:
    early = f"+callbacks.early={{_target_: {__name__}.EndsEarly, step: 9}}"
    run = start_train(*PAIR, early).wait()
    assert run.returncode == 0, run.output
    assert "DONE after step 9. training ended itself before trainer.max_steps=24" in run.output
    assert run.events("checkpoint_committed")[-1]["step"] == 9
    again = start_train(*PAIR, early).wait()
    assert again.returncode == 0, again.output
    assert "is DONE after step 9; training ended itself" in again.output
    assert len(again.events("plan")) == 1
    more = start_train(*PAIR, early, "trainer.max_steps=25").wait()
    assert more.returncode == 0, more.output
    assert [event["step"] for event in more.events("restored")] == [9]
    expected = undisturbed(tmp_path / "plain", *PAIR, "trainer.max_steps=25")
    assert digest_of(more.run_dir) == digest_of(expected)
