from __future__ import annotations

import torch
from torch import nn

from hetero_fw.checkpoint import LiveState, flatten_training_state
from tests.unit.checkpoint.examples import Model, make_optimizer, train, trained


def test_looked_up_once_it_follows_the_training() -> None:
    module, optimizer = trained()
    live = LiveState(module, optimizer)
    train(module, optimizer, 3, 6)
    optimizer.param_groups[0]["lr"] = 0.5
    tensors, values = live.flatten()
    expected, expected_values = flatten_training_state(module, optimizer)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert values == expected_values
    assert values["optimizer"]["param_groups"][0]["lr"] == 0.5


def test_state_that_the_optimizer_makes_later_is_found() -> None:
    module = Model()
    optimizer = make_optimizer("adamw", module)
    live = LiveState(module, optimizer)
    assert not any(name.startswith("optim.") for name in live.flatten()[0])
    train(module, optimizer, 0, 1)
    assert "optim.first.weight.exp_avg" in live.flatten()[0]
    assert "optimizer" not in live.flatten(with_optimizer=False)[1]


def test_copies_of_buffers_do_not_change_with_them() -> None:
    module, optimizer = trained()
    live = LiveState(module, optimizer)
    before = live.copy_buffers()
    assert before.keys() == live.buffers
    assert "model.norm.running_mean" in before
    module(torch.randn(6, 5))
    now = live.flatten()[0]
    assert not torch.equal(before["model.norm.running_mean"], now["model.norm.running_mean"])
    assert live.changing >= live.buffers


def test_a_buffer_that_another_replaced() -> None:
    module, optimizer = trained()
    live = LiveState(module, optimizer)
    module.norm.running_mean = torch.full_like(module.norm.running_mean, 7.0)
    assert live.flatten()[0]["model.norm.running_mean"][0] == 7.0
    assert live.copy_buffers()["model.norm.running_mean"][0] == 7.0


def test_writes_between_two_steps_are_noticed() -> None:
    module = nn.ModuleDict({"trained": nn.Linear(2, 2), "average": nn.Linear(2, 2)})
    module["average"].requires_grad_(False)
    optimizer = torch.optim.SGD(module["trained"].parameters(), lr=0.1)
    live = LiveState(module, optimizer)
    before = live.versions()
    module["trained"](torch.randn(3, 2)).sum().backward()
    assert live.versions() == before
    with torch.no_grad():
        module["trained"].weight.mul_(2.0)
    assert live.versions() != before
    before = live.versions()
    with torch.no_grad():
        module["average"].weight.lerp_(module["trained"].weight, 0.1)
    assert live.versions() != before
    assert live.changing == {"model.average.weight", "model.average.bias"}
