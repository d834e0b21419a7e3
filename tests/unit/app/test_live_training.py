"""What goes into a checkpoint is what stands, and a write to it is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from hetero_fw.app.live_training import LiveTraining
from hetero_fw.errors import CheckpointError


class Module(pl.LightningModule):
    """One layer, and a buffer that a step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(1))


class Case:
    """A rank other than the first, in a training that is saved."""

    def __init__(self) -> None:
        self.module = Module()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        trainer: Any = SimpleNamespace(
            callbacks=[], callback_metrics={}, lightning_module=self.module
        )
        self.module.trainer = trainer
        ckpt = SimpleNamespace(monitor=None, save_optimizer_states=True)
        context: Any = SimpleNamespace(
            cfg=SimpleNamespace(ckpt=ckpt), rank=1, device=torch.device("cpu")
        )
        strategy: Any = SimpleNamespace(optimizers=[self.optimizer], last_loss=1.0)
        self.training = LiveTraining(context, strategy, self.module)

    def compute(self) -> None:
        """A step up to the optimizer's part."""
        self.module.layer(torch.randn(4, 3)).sum().backward()
        self.module.count += 1

    def write(self) -> None:
        with torch.no_grad():
            self.module.layer.bias.add_(1.0)


def test_a_save_knows_whether_its_weights_were_written() -> None:
    case = Case()
    content = case.training.content(3, "test")
    case.compute()
    assert content.is_unchanged()
    case.write()
    assert not content.is_unchanged()
    # The next one begins from what is there.
    assert case.training.content(4, "test").is_unchanged()


def test_a_standing_step_ends_with_a_write_to_its_weights() -> None:
    case = Case()
    standing = case.training.stand(3)
    case.compute()
    content = standing.content("test")
    assert content.tensors["model.count"] == 0
    assert content.tensors["model.layer.bias"] is not None
    case.write()
    assert not content.is_unchanged()
    with pytest.raises(CheckpointError, match="outside of the optimizer's step"):
        standing.content("test")
