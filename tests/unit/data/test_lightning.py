"""The loaders inside a stock Trainer: taken as they are, read from where a resumed run stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from hetero_fw.data import MicroBatch, RankPart, build_train_loader, build_val_loader

SAMPLES = torch.arange(26.0).reshape(13, 2)


class Recorder(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.seen: list[list[list[float]]] = []

    def training_step(self, microbatches: list[MicroBatch], batch_idx: int) -> torch.Tensor:
        self.seen.append([microbatch.batch[:, 0].tolist() for microbatch in microbatches])
        loss: torch.Tensor = self.layer(microbatches[0].batch).square().mean()
        return loss

    def validation_step(self, microbatch: MicroBatch, batch_idx: int) -> None:
        self.log("val_mean", microbatch.batch.mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(tmp_path: Path, start_step: int) -> tuple[Recorder, Any]:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        use_distributed_sampler=False,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    part = RankPart(shares=(5,), rank=0, microbatches=(3, 2))
    module = Recorder()
    trainer.fit(
        module,
        build_train_loader(SAMPLES, seed=1, part=part, max_steps=6, start_step=start_step),
        build_val_loader(SAMPLES, rank=0, world_size=1, batch_size=5),
    )
    return module, trainer.callback_metrics


# Lightning asks for workers where there are none; its own tree walk uses a deprecated name.
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated")
def test_stock_trainer(tmp_path: Path) -> None:
    whole, metrics = fit(tmp_path, start_step=0)
    tail, _ = fit(tmp_path, start_step=4)
    assert len(whole.seen) == 6
    assert tail.seen == whole.seen[4:]
    assert [len(values) for values in whole.seen[0]] == [3, 2]
    # Weighted by the size of each batch: they hold 4, 4 and 5 samples.
    assert metrics["val_mean"].item() == pytest.approx(SAMPLES.mean().item())
