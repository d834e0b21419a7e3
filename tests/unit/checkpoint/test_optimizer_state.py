"""Whatever an optimizer keeps comes back as it was, or is refused by name."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, AdamW, Optimizer

from hetero_fw.checkpoint import flatten_training_state, restore_training_state, weights_digest
from hetero_fw.checkpoint.optimizer_state import flatten_optimizer, install_state
from hetero_fw.errors import CheckpointError
from tests.unit.checkpoint.examples import WAIT_S, Model, make_saver

Parameters = Iterable[nn.Parameter]


class Scaled(SGD):
    """Its rate falls with a count that it keeps somewhere."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)

    def count(self) -> int:
        raise NotImplementedError

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count()
        return super().step(closure)


class CountsForAll(Scaled):
    """Keeps it beside the parameters, with an average that is no parameter's."""

    def count(self) -> int:
        total = sum(p.grad.sum() for group in self.param_groups for p in group["params"])
        self.state["mean"] = self.state.get("mean", 0.0) * 0.5 + total
        self.state["count"] = self.state.get("count", 0) + 1
        return int(self.state["count"]) + int(self.state["mean"] > 0)


class CountsItself(Scaled):
    """Adds it to its state dict."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self.steps: tuple[int, ...] = (0,)

    def count(self) -> int:
        self.steps = (*self.steps, len(self.steps))
        return len(self.steps)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]
        assert isinstance(self.steps, tuple)
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


class ByParameter(SGD):
    """Changes each parameter by its gradient and what is kept of it."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.change(parameter, self.state[parameter])

    def change(self, parameter: Any, state: dict[Any, Any]) -> None:
        raise NotImplementedError


class CountsSigns(ByParameter):
    """Keeps numbers under numbers, and a pair."""

    def change(self, parameter: Any, state: dict[Any, Any]) -> None:
        counts = state.setdefault("counts", {0: 0, 1: 0})
        counts[int(parameter.grad.sum() > 0)] += 1
        before, _ = state.setdefault("pair", (1.0, 0.0))
        state["pair"] = (before * 0.9, len(counts))
        rate = 0.1 * before / (1 + counts[1]) / len(counts)
        parameter.add_(parameter.grad, alpha=-rate)


class Remembers(ByParameter):
    """Keeps the last gradients in lists, and one under a number."""

    def change(self, parameter: Any, state: dict[Any, Any]) -> None:
        seen = state.setdefault("seen", deque(maxlen=3))
        seen.append(parameter.grad.clone())
        state[0] = {"mean.of": [sum(seen) / len(seen)], "none": torch.empty(0, 2)}
        parameter.sub_(state[0]["mean.of"][0], alpha=0.1)


OPTIMIZERS: dict[str, Callable[[Parameters], Optimizer]] = {
    "beside": CountsForAll,
    "added": CountsItself,
    "numbers": CountsSigns,
    "lists": Remembers,
    "lbfgs": lambda parameters: LBFGS(parameters, lr=0.01, max_iter=3, history_size=2),
    "adafactor": lambda parameters: Adafactor(parameters, lr=0.1),
}


def train(module: nn.Module, optimizer: Optimizer, first_step: int, last_step: int) -> None:
    for step in range(first_step, last_step):
        data = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))

        def closure(data: torch.Tensor = data) -> Any:
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = module(data).square().mean()
            loss.backward()
            return loss

        closure()
        optimizer.step(closure if isinstance(optimizer, LBFGS) else None)  # type: ignore[arg-type]


def saved(root: Path, module: nn.Module, optimizer: Optimizer) -> Path:
    tensors, state = flatten_training_state(module, optimizer)
    buffers = {f"model.{name}" for name, _ in module.named_buffers()}
    handle = make_saver(root).save(3, tensors, state, reason="test", may_be_infinite=buffers)
    assert handle.wait(WAIT_S)
    assert handle.outcome is not None
    assert handle.outcome.path is not None, handle.outcome.reason
    return handle.outcome.path


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_resumed_training_goes_on_as_one_that_went_on(tmp_path: Path, kind: str) -> None:
    module = Model()
    optimizer = OPTIMIZERS[kind](module.parameters())
    train(module, optimizer, 0, 4)
    path = saved(tmp_path, module, optimizer)
    resumed = Model()
    other = OPTIMIZERS[kind](resumed.parameters())
    restore_training_state(resumed, other, path)
    for one in (module, resumed):
        train(one, optimizer if one is module else other, 4, 8)
    assert weights_digest(resumed) == weights_digest(module)
    last, last_state = flatten_training_state(module, optimizer)
    now, now_state = flatten_training_state(resumed, other)
    assert now_state == last_state
    assert now.keys() == last.keys()
    assert all(torch.equal(now[name], last[name]) for name in last)


def test_state_of_an_empty_parameter_has_no_bytes_and_comes_back() -> None:
    def build() -> tuple[Optimizer, dict[nn.Parameter, str]]:
        parameter = nn.Parameter(torch.ones(0, 3, dtype=torch.bfloat16))
        parameter.grad = torch.ones_like(parameter)
        return AdamW([parameter]), {parameter: "empty"}

    optimizer, names = build()
    optimizer.step()
    tensors, state = flatten_optimizer(optimizer, names)
    assert tensors.keys() == {"optim.empty.step"}
    other, names = build()
    install_state(other, names, tensors, json.loads(json.dumps(state)))
    (restored,) = other.state.values()
    assert (restored["exp_avg"].shape, restored["exp_avg"].dtype) == ((0, 3), torch.bfloat16)
    other.step()


@pytest.mark.parametrize("place", ["of a parameter", "beside", "group"])
def test_what_cannot_be_kept_is_refused_by_name(place: str) -> None:
    module = nn.Linear(2, 2)
    optimizer = SGD(module.parameters(), lr=0.1)
    kept, told = {
        "of a parameter": (optimizer.state[module.weight], r"weight\.made \(function\)"),
        "beside": (optimizer.state, r"common\.made \(function\)"),
        "group": (optimizer.param_groups[0], r"param_groups\.0\.made \(function\)"),
    }[place]
    kept["made"] = lambda: 1
    with pytest.raises(CheckpointError, match=f"SGD holds what no checkpoint can keep: {told}"):
        flatten_training_state(module, optimizer)


def test_settings_of_groups_keep_their_types(tmp_path: Path) -> None:
    def build(**settings: Any) -> tuple[nn.Module, Optimizer]:
        module = nn.Linear(2, 2)
        return module, SGD([{"params": list(module.parameters()), **settings}], lr=0.1)

    settings = {"table": {1: (2, 3)}, "per": torch.tensor([1.0, 2.0])}
    path = saved(tmp_path, *build(**settings))
    module, optimizer = build()
    restore_training_state(module, optimizer, path)
    group = optimizer.param_groups[0]
    assert group["table"] == {1: (2, 3)}
    assert group["per"].tolist() == [1.0, 2.0]
