from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from hetero_fw.errors import ConfigError
from recipes.digits import DigitsDataset, DigitsModule, digits_workload


class Trainable(DigitsModule):
    """What the framework adds: an optimizer."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def test_splits_share_nothing_and_cover_everything() -> None:
    train, val = DigitsDataset(split="train"), DigitsDataset(split="val")
    assert (len(train), len(val)) == (1438, 359)
    pixels = {tuple(split[k][0].tolist()) for split in (train, val) for k in range(len(split))}
    assert len(pixels) == 1797, "no digit is in both"
    again = DigitsDataset(split="val")
    assert torch.equal(val[7][0], again[7][0])
    assert not torch.equal(val[7][0], DigitsDataset(split="val", seed=1)[7][0])


def test_samples() -> None:
    dataset = DigitsDataset()
    pixels, label = dataset[3]
    assert pixels.shape == (64,)
    assert pixels.dtype == torch.float32
    assert 0 <= pixels.min() < pixels.max() <= 1
    assert label.dtype == torch.int64
    for index, sample in zip([3, 1], dataset.__getitems__([3, 1]), strict=True):
        assert torch.equal(sample[0], dataset[index][0])
        assert torch.equal(sample[1], dataset[index][1])


def test_wrong_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="split='test'"):
        DigitsDataset(split="test")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"val_fraction=1\.0"):
        DigitsDataset(val_fraction=1.0)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match="pip install scikit-learn"):
        DigitsDataset()


@pytest.mark.parametrize("shape", [(128, 2), (32, 0), (16, 1)])
def test_workload_is_what_torch_counts(shape: tuple[int, int]) -> None:
    hidden_dim, num_hidden_layers = shape
    module = DigitsModule(hidden_dim=hidden_dim, num_hidden_layers=num_hidden_layers)
    workload = digits_workload(hidden_dim=hidden_dim, num_hidden_layers=num_hidden_layers)
    params = dict(module.named_parameters())
    assert workload.num_params == sum(param.numel() for param in params.values())
    for layer in workload.layers:
        of_layer = [p.numel() for name, p in params.items() if name.startswith(f"{layer.name}.")]
        assert layer.num_params == sum(of_layer)
    with FlopCounterMode(display=False) as counter:
        module.training_step((torch.rand(4, 64), torch.arange(4)), 0).backward()
    assert counter.get_total_flops() / 4 == workload.flops_per_sample


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated")
def test_digits_are_learnt(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=120,
        val_check_interval=60,
        check_val_every_n_epoch=None,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train = DataLoader(DigitsDataset(split="train"), batch_size=64, shuffle=True)
    val = DataLoader(DigitsDataset(split="val"), batch_size=64)
    module = Trainable(hidden_dim=64, num_hidden_layers=1)
    [before] = trainer.validate(module, val, verbose=False)
    trainer.fit(module, train, val)
    after = trainer.callback_metrics
    assert before["val_accuracy"] < 0.3
    assert after["val_accuracy"] > 0.9
    assert after["val_loss"] < 0.5 * before["val_loss"]
