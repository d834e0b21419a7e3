"""A run whose checkpoints do not fit is refused before it starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.conftest import TrainRun
from tests.recovery.test_kill import TINY
from tests.small_disk import small_disk

Train = Callable[..., TrainRun]

# The tiny GPT's weights and AdamW state take 0.5 MB; 0.9 MB hold one checkpoint and not two.
DISK_BYTES = 900 * 1024


def test_a_disk_too_small_for_two_checkpoints_is_refused(
    train: Train, tmp_path: Path, run_dir: Path
) -> None:
    with small_disk(run_dir.parent, DISK_BYTES):
        run = train(*TINY)
        assert run.returncode == 2, run.output
        assert "two checkpoints need 993.00 KiB" in run.output
        assert f"on {run_dir.parent}; 900.00 KiB are free there" in run.output
        assert "ckpt=none" in run.output
        assert "Traceback" not in run.output
        assert not run.run_dir.exists()

        run = train(*TINY, "ckpt=none", "monitor.report=false", "logger=none")
        assert run.returncode == 0, run.output
        assert run.read_json("status.json")["status"] == "DONE"
        assert not list((run.run_dir / "checkpoints").glob("*"))
