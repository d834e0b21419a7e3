"""A run ends once its last step is safe, however long older checkpoints take to go."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from hetero_fw.checkpoint import list_checkpoints, read_back
from tests.conftest import TrainRun
from tests.recovery.runs import PAIR, digest_of, undisturbed

COLLECTIVE_S = 6.0
READING_S = 10.0


class SlowReading(pl.Callback):
    """Rank 0 reads a file back for `READING_S` once training has ended, and leaves `marker`."""

    def __init__(self, *, marker: str) -> None:
        self._marker = Path(marker)
        self._read = read_back.verify_file

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_rank == 0 and trainer.global_step == trainer.max_steps:
            read_back.verify_file = self._read_slowly

    def _read_slowly(self, *arguments: Any) -> None:
        *_, go_on = arguments
        ends_s = time.monotonic() + READING_S
        while time.monotonic() < ends_s:
            go_on()
            time.sleep(0.1)
        self._read(*arguments)
        self._marker.touch()


def test_others_do_not_wait_in_a_collective_for_what_is_read_back(
    train: Callable[..., TrainRun], tmp_path: Path
) -> None:
    run = train(
        *PAIR,
        "ckpt.keep_latest_k=2",
        "ckpt.async_mode=async",  # in the rank's own process, where this test can slow it down
        f"recovery.process_group_timeout_s={COLLECTIVE_S}",
        "recovery.heartbeat_interval_s=1.5",
        f"+callbacks.slow._target_={__name__}.SlowReading",
        f"+callbacks.slow.marker={tmp_path}/read",
    )
    assert run.returncode == 0, run.output
    assert (tmp_path / "read").exists()
    assert not run.events("failure_detected")
    infos = list_checkpoints(run.run_dir / "checkpoints", "hetero_ckpt")
    assert [infos[0].step, len(infos)] == [24, 2]
    assert digest_of(run.run_dir) == digest_of(undisturbed(tmp_path / "plain", *PAIR))
