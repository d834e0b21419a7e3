"""Whatever a module keeps beside its weights goes on where it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TrainRun
from tests.recovery.runs import PAIR, column, undisturbed

Train = Callable[..., TrainRun]

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize("grows", [False, True])
def test_it_goes_on_exactly_and_on_another_number_of_ranks(
    train: Train, tmp_path: Path, grows: bool
) -> None:
    keeping = (
        *PAIR,
        "parallel.precision=32-true",
        "model.module._target_=tests.recovery.keeping.KeepingGPT",
        f"+model.module.grows={grows}",
    )
    # Beside a step that hangs only what saves were planned for is saved, and if it is worth it.
    interval = "ckpt.interval_steps=6" if grows else "ckpt.interval_steps=20"
    failing = (
        interval,
        "+model.module.fail_step=9",
        f"+model.module.marker={tmp_path / 'failed'}",
    )
    first = train(*keeping, *failing, "trainer.max_steps=12")
    assert first.returncode == 0, first.output
    assert [event["step"] for event in first.events("restored")] == [6 if grows else 8]
    assert "total.sum_value as rank 0 has them" in first.output
    expected = undisturbed(tmp_path / "undisturbed", *keeping, "trainer.max_steps=14")
    assert column(first.run_dir, "loss") == column(expected, "loss")[:12]

    second = train(*keeping, *failing, "trainer.max_steps=14", "parallel=single")
    assert second.returncode == 0, second.output
    assert [event["step"] for event in second.events("restored")][1:] == [12]
    losses = [float(loss) for loss in column(second.run_dir, "loss")]
    assert losses == pytest.approx([float(loss) for loss in column(expected, "loss")], rel=1e-5)
