"""What goes into a checkpoint is what stands, and a write to it is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from hetero_fw.app.checkpoint_hooks import ask_hooks
from hetero_fw.app.live_training import LiveTraining
from hetero_fw.errors import CheckpointError, ConfigError


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


def test_what_no_checkpoint_can_hold_ends_the_training() -> None:
    case = Case()
    case.optimizer.state[case.module.layer.weight]["made"] = lambda: 1
    told = (
        r"the state of SGD holds what no checkpoint can keep: layer\.weight\.made \(function\)\. "
    )
    with pytest.raises(ConfigError, match=told):
        case.training.content(3, "test")
    case = Case()
    case.optimizer.state[case.module.layer.weight]["bits"] = torch.empty(3, dtype=torch.uint4)
    told = r"that the format does not hold: optim\.layer\.weight\.bits \(torch\.uint4\)\. "
    with pytest.raises(ConfigError, match=told):
        case.training.tensors()


class Overwriting(pl.Callback):
    """Writes where it should only read."""

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["state_dict"] = {"weight": torch.ones(3)}
        checkpoint["loops"]["own"] = 1
        checkpoint["epoch"] = checkpoint["epoch"]
        checkpoint["own"] = 1


def test_what_a_hook_writes_in_the_place_of_something_else_is_told() -> None:
    trainer = pl.Trainer(callbacks=[Overwriting()], logger=False, enable_checkpointing=False)
    trainer.strategy._lightning_module = Module()
    told: list[str] = []
    assert ask_hooks(trainer, told.append) == {"hooks": {"own": 1}}
    assert told == [
        "what on_save_checkpoint of Overwriting puts in 'state_dict'",
        "what on_save_checkpoint of Overwriting puts in 'loops'",
    ]
