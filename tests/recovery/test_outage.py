"""A storage that fails while an attempt begins costs seconds, not the run."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path

from tests.conftest import TrainRun
from tests.recovery.runs import NO_LAST_SAVE, PAIR, faulty
from tests.storage_faults import Fault, faulty_storage

Start = Callable[..., TrainRun]
OUTAGE_S = 8.0
EVERYTHING = ("getattr", "readdir", "open", "create", "read", "write", "mkdir", "rename", "fsync")


def test_an_outage_at_a_restart_is_waited_for(start_train: Start, tmp_path: Path) -> None:
    marker = tmp_path / "failed"
    with faulty_storage(tmp_path) as storage:
        run = start_train(
            *PAIR,
            *faulty(fail_rank=1, fail_step=100, marker=marker),
            NO_LAST_SAVE,
            "trainer.max_steps=110",
            f"ckpt.storage={storage.root}",
        )
        run.wait_until(marker.exists)
        storage.inject(Fault(operations=EVERYTHING, error=errno.EIO))
        time.sleep(OUTAGE_S)
        storage.heal()
        run.wait()
    assert run.returncode == 0, run.output
    assert len(run.events("failure_detected")) == 1
    assert run.events("restored")[0]["step"] >= 6
