from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from hetero_fw.checkpoint import (
    LiveState,
    flatten_training_state,
    restore_training_state,
    weights_digest,
)
from hetero_fw.errors import CheckpointError
from tests.unit.checkpoint.examples import (
    WAIT_S,
    Model,
    content_digest,
    make_optimizer,
    make_saver,
    train,
    trained,
)

KINDS = ["adamw", "amsgrad", "sgd"]


def checkpoint(root: Path, module: nn.Module, optimizer: Optimizer | None) -> Path:
    return saved(root, module, *flatten_training_state(module, optimizer))


def saved(
    root: Path, module: nn.Module, tensors: dict[str, torch.Tensor], state: dict[str, Any]
) -> Path:
    saver = make_saver(root)
    handle = saver.save(
        3,
        tensors,
        {"loop": 3, **state},
        reason="test",
        may_be_infinite=LiveState(module, None).buffers,
    )
    assert handle.wait(WAIT_S)
    assert handle.outcome is not None
    assert handle.outcome.path is not None, handle.outcome.reason
    return handle.outcome.path


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_bit_identical_to_one_that_went_on(tmp_path: Path, kind: str) -> None:
    module, optimizer = trained(kind=kind)
    path = checkpoint(tmp_path, module, optimizer)
    torch.manual_seed(99)
    resumed = Model()
    resumed_optimizer = make_optimizer(kind, resumed)
    state = restore_training_state(resumed, resumed_optimizer, path)
    assert state["loop"] == 3
    assert content_digest(resumed, resumed_optimizer) == content_digest(module, optimizer)
    train(module, optimizer, 3, 8)
    train(resumed, resumed_optimizer, 3, 8)
    assert content_digest(resumed, resumed_optimizer) == content_digest(module, optimizer)


def test_names(tmp_path: Path) -> None:
    tensors, state = flatten_training_state(*trained())
    assert {"model.first.weight", "model.norm.running_mean", "model.mask"} <= tensors.keys()
    assert {"optim.first.weight.exp_avg", "optim.scale.step"} <= tensors.keys()
    assert state["optimizer"]["param_groups"][0]["params"][0] == "scale"
    assert LiveState(Model(), None).buffers >= {"model.mask", "model.norm.running_var"}


def test_flattening_copies_nothing() -> None:
    module, optimizer = trained()
    tensors, _ = flatten_training_state(module, optimizer)
    assert tensors["model.first.weight"].data_ptr() == module.first.weight.data_ptr()


def test_a_new_optimizer_gets_the_saved_settings(tmp_path: Path) -> None:
    module, optimizer = trained()
    optimizer.param_groups[0]["lr"] = 0.125
    path = checkpoint(tmp_path, module, optimizer)
    other = Model()
    other_optimizer = AdamW(other.parameters(), lr=torch.tensor(0.5), foreach=False)
    restore_training_state(other, other_optimizer, path)
    lr = other_optimizer.param_groups[0]["lr"]
    assert isinstance(lr, torch.Tensor)
    assert lr.item() == 0.125
    assert other_optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_counters_stay_on_the_host_as_scalars(tmp_path: Path) -> None:
    module, optimizer = trained()
    path = checkpoint(tmp_path, module, optimizer)
    other = Model()
    other_optimizer = make_optimizer("adamw", other)
    restore_training_state(other, other_optimizer, path)
    step = other_optimizer.state[other.scale]["step"]
    assert step.shape == ()
    assert step.item() == 3.0


def test_weights_alone(tmp_path: Path) -> None:
    module, _ = trained()
    path = checkpoint(tmp_path, module, None)
    other, optimizer = trained(seed=4)
    before: dict[str, Any] = optimizer.state_dict()["state"]
    state = restore_training_state(other, optimizer, path)
    assert "optimizer" not in state
    assert weights_digest(other) == weights_digest(module)
    assert optimizer.state_dict()["state"].keys() == before.keys()


def test_an_optimizer_that_has_not_stepped(tmp_path: Path) -> None:
    module = Model()
    path = checkpoint(tmp_path, module, make_optimizer("adamw", module))
    other, optimizer = trained(seed=4)
    restore_training_state(other, optimizer, path)
    assert dict(optimizer.state) == {}


def test_several_groups_and_frozen_parameters(tmp_path: Path) -> None:
    def build() -> tuple[Model, Optimizer]:
        module = Model()
        module.last.requires_grad_(False)
        groups = [
            {"params": list(module.first.parameters()), "lr": 0.5},
            {"params": [module.scale], "weight_decay": 0.25},
        ]
        return module, SGD(groups, lr=0.1, momentum=0.5)

    module, optimizer = build()
    train(module, optimizer, 0, 2)
    other, other_optimizer = build()
    restore_training_state(other, other_optimizer, checkpoint(tmp_path, module, optimizer))
    assert content_digest(other, other_optimizer) == content_digest(module, optimizer)
    assert [group["lr"] for group in other_optimizer.param_groups] == [0.5, 0.1]


def test_an_optimizer_with_other_groups_is_refused_before_anything_changes(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, *trained())
    other = Model()
    before = weights_digest(other)
    with pytest.raises(CheckpointError, match="other parameter groups"):
        restore_training_state(other, AdamW(other.first.parameters(), lr=0.1), path)
    assert weights_digest(other) == before


def test_a_module_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, nn.Linear(3, 4), None)
    with pytest.raises(CheckpointError, match=r"model\.weight is \[4, 3\], expected \[5, 3\]"):
        restore_training_state(nn.Linear(3, 5), None, path)


def test_wrappers_do_not_change_names() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    compiled = nn.Module()
    compiled.add_module("_orig_mod", module)  # as torch.compile does
    assert flatten_training_state(compiled, None)[0].keys() == {"model.0.weight", "model.0.bias"}
    assert weights_digest(compiled) == weights_digest(module)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    with pytest.raises(CheckpointError, match="not in the module"):
        flatten_training_state(Model(), SGD(Model().parameters(), lr=0.1))


def test_the_digest_tells_weights_apart() -> None:
    module, _ = trained()
    same, _ = trained()
    assert weights_digest(module) == weights_digest(same)
    with torch.no_grad():
        same.scale.add_(1e-6)
    assert weights_digest(module) != weights_digest(same)


def test_state_of_another_class_of_optimizer_is_not_taken(tmp_path: Path) -> None:
    module, optimizer = trained()
    path = checkpoint(tmp_path, module, optimizer)
    other = Model()
    # Another division into groups is none of its business either.
    groups = [{"params": [parameter]} for parameter in other.parameters()]
    other_optimizer = SGD(groups, lr=0.25, momentum=0.5)
    state = restore_training_state(other, other_optimizer, path)
    assert state["optimizer"]["class"] == "AdamW"
    assert weights_digest(other) == weights_digest(module)
    assert not other_optimizer.state
    for group in other_optimizer.param_groups:
        assert (group["lr"], group["momentum"], "betas" in group) == (0.25, 0.5, False)
    train(other, other_optimizer, 3, 4)
    tensors, _ = flatten_training_state(other, other_optimizer)
    kept = {name.rpartition(".")[2] for name in tensors if name.startswith("optim.")}
    assert kept == {"momentum_buffer"}


def test_state_of_a_class_that_an_older_release_did_not_name_is_taken(tmp_path: Path) -> None:
    module, optimizer = trained()
    tensors, state = flatten_training_state(module, optimizer)
    del state["optimizer"]["class"]
    path = saved(tmp_path, module, tensors, state)
    other = Model()
    other_optimizer = make_optimizer("adamw", other)
    restore_training_state(other, other_optimizer, path)
    assert content_digest(other, other_optimizer) == content_digest(module, optimizer)
