"""Every module that can be trained can be restored, or is refused before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torchmetrics import MeanMetric, Metric

from hetero_fw.checkpoint import (
    LiveState,
    canonical_fqn,
    check_module,
    compare_checkpoints,
    export_weights,
    load_weights,
    misfits,
    read_manifest,
    restore_training_state,
    weights_digest,
)
from hetero_fw.errors import CheckpointError
from tests.unit.checkpoint.test_training_state import checkpoint


class Tied(nn.Module):
    """One weight under two names, one submodule in two places, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.again = self.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.again(self.last(self.norm(self.first(x))))
        return y


class Empty(nn.Module):
    """A parameter and a buffer without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.none = nn.Linear(4, 4), nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("queue", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x) + self.none.sum()
        return y


class Growing(nn.Module):
    """Buffers that grow, shrink to nothing, begin as None, or are registered in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("history", torch.zeros(1))
        self.register_buffer("waiting", torch.ones(2))
        self.register_buffer("average", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        self.history = torch.cat([self.history, y.detach().mean().reshape(1)])
        self.waiting = self.waiting[:0]
        self.average = y.detach().double().mean() + (0 if self.average is None else self.average)
        if not hasattr(self.layer, "late"):
            self.layer.register_buffer("late", torch.zeros(4, dtype=torch.int64))
        self.layer.late = self.layer.late + 1
        return y * self.history.mean() * self.average.float() * self.layer.late


class Adding(nn.Module):
    """Entries of its state dict that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.mean = MeanMetric()
        self.mean.persistent(True)
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        self.count += 1
        self.mean.update(y.detach().mean())
        return y * self.mean.compute() * self.count

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}count"] = torch.tensor(self.count)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.count = int(state_dict.pop(f"{prefix}count"))
        super()._load_from_state_dict(state_dict, prefix, *rest)


KINDS: list[Callable[[], nn.Module]] = [Tied, Empty, Growing, Adding]


def steps(module: nn.Module, optimizer: AdamW, first_step: int, last_step: int) -> list[float]:
    losses = []
    for step in range(first_step, last_step):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_as_if_nothing_had_been(tmp_path: Path, kind: Callable[[], nn.Module]) -> None:
    module = kind()
    optimizer = AdamW(module.parameters())
    live = LiveState(module, optimizer)
    steps(module, optimizer, 0, 3)
    path = checkpoint(tmp_path, module, optimizer)
    assert live.flatten()[0].keys() == LiveState(module, optimizer).flatten()[0].keys()
    resumed = kind()
    assert misfits(resumed, read_manifest(path)) == []
    resumed_optimizer = AdamW(resumed.parameters())
    restore_training_state(resumed, resumed_optimizer, path)
    expected = steps(module, optimizer, 3, 6)
    assert steps(resumed, resumed_optimizer, 3, 6) == expected
    assert weights_digest(resumed) == weights_digest(module)


def test_one_tensor_under_two_names_is_saved_as_one(tmp_path: Path) -> None:
    module = Tied()
    optimizer = AdamW(module.parameters())
    live = LiveState(module, optimizer)
    assert "model.last.weight" not in live.changing
    assert {"model.norm.running_mean", "model.again.running_mean"} <= live.copy_buffers().keys()
    steps(module, optimizer, 0, 3)
    path = checkpoint(tmp_path, module, optimizer)
    export_weights(path, tmp_path / "weights.safetensors")
    other = Tied()
    load_weights(other, tmp_path / "weights.safetensors")
    assert weights_digest(other) == weights_digest(module)
    (tmp_path / "other").mkdir()
    again = checkpoint(tmp_path / "other", other, None)
    found = {one.fqn: str(one.likeness) for one in compare_checkpoints(path, again)}
    assert found["model.first.weight"] == found["model.last.weight"] == "equal"


def test_what_a_module_adds_is_never_that_of_an_earlier_step(tmp_path: Path) -> None:
    module = Adding()
    optimizer = AdamW(module.parameters())
    live = LiveState(module, optimizer)
    steps(module, optimizer, 0, 1)
    at_rest = live.copy_buffers()
    module(torch.randn(6, 4))
    assert live.flatten(buffers=at_rest)[0]["model.count"] == 1
    assert live.flatten()[0]["model.count"] == 2
    assert live.flatten()[1]["buffers"] == {}
    assert {"model.count", "model.mean.weight"} <= live.changing


def test_weights_files_have_what_a_module_adds(tmp_path: Path) -> None:
    module = Adding()
    steps(module, AdamW(module.parameters()), 0, 3)
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    other = Adding()
    load_weights(other, tmp_path / "weights.pt")
    assert other.count == 3
    assert other.mean.mean_value == module.mean.mean_value


def test_another_module_is_told_by_name(tmp_path: Path) -> None:
    module = Growing()
    steps(module, AdamW(module.parameters()), 0, 3)
    manifest = read_manifest(checkpoint(tmp_path, module, None))
    assert misfits(nn.Linear(4, 4), manifest) != []
    other = Growing()
    other.layer = nn.Linear(4, 5)
    other.register_buffer("new", torch.zeros(2))
    other.average = None
    del other.history
    other.history = 3  # where the buffer was
    assert misfits(other, manifest) == [
        "history is absent, was (4,)",
        "layer.bias is (5,), was (4,)",
        "layer.weight is (5, 4), was (4, 4)",
        "new is (2,), was absent",
    ]


class Listing(Metric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", default=[], persistent=True)

    def update(self) -> None: ...

    def compute(self) -> None: ...


class Forgetful(nn.Linear):
    """Takes nothing back."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}count"] = torch.tensor(3)


def test_what_no_checkpoint_gives_back_is_refused() -> None:
    with pytest.raises(CheckpointError, match="values of the module is no tensor"):
        check_module(Listing())
    with pytest.raises(CheckpointError, match="adds count to its state_dict and does not take"):
        check_module(Forgetful(2, 2))
    assert check_module(nn.Sequential(Adding())) == [
        "0.count",
        "0.mean.mean_value",
        "0.mean.weight",
    ]
    assert canonical_fqn("a._orig_mod.b") == "a.b"


def test_an_entry_that_a_module_above_adds() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    values = iter(range(9))

    def add(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        state[f"{prefix}0.count"] = torch.tensor(next(values))

    module._register_state_dict_hook(add)
    live = LiveState(module, None)
    first = live.flatten()[0]["model.0.count"]
    assert live.flatten()[0]["model.0.count"] > first
