"""A run that goes on with other ranks is the same training: its batches, its epochs, its losses."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero_fw.checkpoint import list_checkpoints
from tests.conftest import TrainRun
from tests.recovery.runs import PAIR, column, undisturbed
from tests.recovery.test_kill import TINY
from tests.unit.checkpoint.examples import PREFIX

Train = Callable[..., TrainRun]

pytestmark = pytest.mark.timeout(300)

LENGTH = 16
NUM_SAMPLES = 101
BATCH = 16
MAX_STEPS = 24

# Each plan ends within an epoch, at another place of it.
PLANS = {
    "two ranks": (8, (*PAIR, "parallel.batch_split=[11,5]")),
    "four unequal ranks": (15, (*TINY, "parallel.batch_split=[7,4,3,2]")),
    "one device": (MAX_STEPS, (*PAIR, "parallel=single")),
}


def listing(root: Path, name: str) -> tuple[str, ...]:
    """Overrides for a few samples, all different, and a list in `name` of those that are used."""
    text = root / "corpus.txt"
    names = (hashlib.sha256(str(n).encode()).hexdigest()[:LENGTH] for n in range(NUM_SAMPLES))
    text.write_text("".join(names) + ".")
    (root / name).mkdir()
    return (
        f"data.paths={text}",
        f"data.sequence_length={LENGTH}",
        "data.train.val_fraction=0",
        "data.val=null",
        f"data.global_batch_size={BATCH}",
        # The faster devices could do with less, and another precision is another training.
        "parallel.precision=32-true",
        "ckpt.keep_latest_k=9",
        "model.module._target_=tests.recovery.modules.ListingGPT",
        f"+model.module.folder={root / name}",
    )


def batches(folder: Path) -> list[Counter[str]]:
    """Which samples each step has used, on all ranks together."""
    found = [Counter[str]() for _ in range(MAX_STEPS)]
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            step, sample = line.split()
            found[int(step) - 1][sample] += 1
    return found


def test_every_batch_and_every_loss_is_that_of_one_plan(train: Train, tmp_path: Path) -> None:
    changing = listing(tmp_path, "changing")
    for last_step, overrides in PLANS.values():
        run = train(*overrides, *changing, f"trainer.max_steps={last_step}")
        assert run.returncode == 0, run.output
    assert [event["step"] for event in run.events("restored")] == [8, 15]
    saved = {i.step: i.world_size for i in list_checkpoints(run.run_dir / "checkpoints", PREFIX)}
    assert [saved[last_step] for last_step, _ in PLANS.values()] == [2, 4, 1]

    _, one_device = PLANS["one device"]
    same = (*one_device, *listing(tmp_path, "same"), f"trainer.max_steps={MAX_STEPS}")
    expected = undisturbed(tmp_path / "undisturbed", *same)
    used = batches(tmp_path / "changing")
    assert used == batches(tmp_path / "same")
    assert {batch.total() for batch in used} == {BATCH}
    stream = sum(used, Counter[str]())
    # 384 samples are three whole epochs and a part of the fourth.
    assert len(stream) == NUM_SAMPLES
    assert set(stream.values()) == {3, 4}
    losses = [float(text) for text in column(run.run_dir, "loss")]
    wanted = [float(text) for text in column(expected, "loss")]
    assert losses == pytest.approx(wanted, rel=1e-5)
