"""The metric of a save after an exception is that of the last finished step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from hetero_fw.checkpoint import Metric, checkpoint_path, read_manifest
from recipes.gpt import GPTModule
from tests.conftest import TrainRun
from tests.recovery.runs import PAIR

FAIL_STEP = 8


class CountingGPT(GPTModule):
    """Logs the number of the step, looks at what is logged, as a progress bar does, and raises."""

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        step = self.trainer.global_step + 1
        self.log("num_steps", float(step))
        assert float(self.trainer.callback_metrics["num_steps"]) == step
        if step == FAIL_STEP:
            raise RuntimeError("raised on purpose")
        return loss


def test_the_step_that_raises_does_not_change_it(
    train: Callable[..., TrainRun], run_dir: Path
) -> None:
    run = train(
        *PAIR,
        f"model.module._target_={__name__}.CountingGPT",
        "ckpt.monitor=num_steps",
        "ckpt.interval_steps=12",
        "recovery.max_restarts=0",
    )
    assert run.returncode == 1, run.output
    saved = FAIL_STEP - 1
    manifest = read_manifest(checkpoint_path(run_dir / "checkpoints", "hetero_ckpt", saved))
    assert manifest.metric == Metric(name="num_steps", value=float(saved))
