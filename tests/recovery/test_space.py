"""A run whose checkpoints do not fit is refused before it starts, or keeps what fits."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.conftest import TrainRun
from tests.recovery.test_kill import TINY, steps_done
from tests.small_disk import small_disk

Train = Callable[..., TrainRun]

# The tiny GPT's weights and AdamW state take 0.5 MB; 0.9 MB hold one checkpoint and not two, 1.2 MB
# hold two and no third one while it is written, and 1.8 MB three.
KIB = 1024
DISK_BYTES = 900 * KIB


def test_a_disk_too_small_for_two_checkpoints_is_refused(
    train: Train, tmp_path: Path, run_dir: Path
) -> None:
    with small_disk(run_dir.parent, DISK_BYTES):
        run = train(*TINY)
        assert run.returncode == 2, run.output
        assert "two that are kept and one that is being written, need 1.45 MiB" in run.output
        assert f"on {run_dir.parent}; 900.00 KiB are free there" in run.output
        assert "ckpt=none" in run.output
        assert "Traceback" not in run.output
        assert not run.run_dir.exists()

        run = train(*TINY, "ckpt=none", "monitor.report=false", "logger=none")
        assert run.returncode == 0, run.output
        assert run.read_json("status.json")["status"] == "DONE"
        assert not list((run.run_dir / "checkpoints").glob("*"))


def test_a_disk_without_room_for_the_next_one_is_refused(train: Train, run_dir: Path) -> None:
    with small_disk(run_dir.parent, 1240 * KIB):
        run = train(*TINY)
        assert run.returncode == 2, run.output
        assert "need 1.45 MiB" in run.output
        assert "1.21 MiB are free there" in run.output


def test_saves_go_on_where_less_fits_than_is_to_be_kept(
    train: Train, tmp_path: Path, run_dir: Path
) -> None:
    with small_disk(tmp_path / "disk", 1800 * KIB) as disk:
        run = train(*TINY, "trainer.max_steps=48", f"ckpt.storage={disk}")
        assert run.returncode == 0, run.output
        assert f"ckpt.keep_latest_k=3 takes 1.94 MiB on {disk}/{run_dir.name} while" in run.output
        assert "1.76 MiB are free there, and 2 is the most that fits" in run.output
        assert not re.findall("checkpoint of step .* failed: .*", run.output)
        # On a busy machine a later save may come before what it replaces has gone.
        told, *later = re.findall(
            "the storage is full, .*No space left on device; (.*)", run.output
        )
        assert re.fullmatch(
            "hetero_ckpt-step-00000006 was deleted to make room and ckpt.keep_latest_k=2 holds "
            r"from now on; the save of step 2\d is tried again",
            told,
        )
        assert not [text for text in later if "holds from now on" in text]
        left = sorted(path.name[-2:] for path in (disk / run_dir.name).glob("*-step-*"))
        assert (len(left), left[-1]) == (2, "48")


def test_a_status_that_cannot_be_written_for_a_moment_ends_nothing(start_train: Train) -> None:
    run = start_train(*TINY, "trainer.max_steps=60")
    run.wait_until(lambda: steps_done(run) >= 2)
    status = run.run_dir / "status.json"
    status.unlink()
    status.mkdir()
    (status / "in-the-way").touch()
    step = steps_done(run)
    run.wait_until(lambda: steps_done(run) >= step + 6)
    shutil.rmtree(status)
    run.wait()
    assert run.returncode == 0, run.output
    assert run.read_json("status.json")["step"] == 60
