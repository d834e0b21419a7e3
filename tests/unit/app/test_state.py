"""State that is not tensors goes through JSON and comes back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from hetero_fw.app.json_state import from_plain, to_plain
from hetero_fw.app.state import Monitored
from hetero_fw.checkpoint import Metric

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, milestones=[3, 6]),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=12),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.1, max_lr=1.0, step_size_up=3),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.MultiStepLR(o, milestones=[2, 4])],
        milestones=[3],
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=5), lr_scheduler.ExponentialLR(o, gamma=0.9)]
    ),
}


def through_json(value: Any) -> Any:
    return from_plain(json.loads(json.dumps(to_plain(value))))


def make(name: str) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5, momentum=0.9)
    return optimizer, SCHEDULERS[name](optimizer)


def advance(optimizer: Any, scheduler: Any, num_steps: int) -> list[float]:
    rates = []
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("num_before", [1, 4])
def test_scheduler_goes_on_as_if_nothing_had_happened(name: str, num_before: int) -> None:
    optimizer, scheduler = make(name)
    advance(optimizer, scheduler, num_before)
    state = through_json(scheduler.state_dict())
    settings = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    expected = advance(optimizer, scheduler, 7)

    optimizer, scheduler = make(name)
    optimizer.param_groups[0].update(settings)
    scheduler.load_state_dict(state)
    assert advance(optimizer, scheduler, 7) == expected


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        0.1,
        float("inf"),
        "text",
        [1, [2.5, "x"]],
        {"a": {"b": [None]}},
        {3: "three", 4: {5: 6}},
        {(1, 2): "pair", "a": 1},
        {None: 0, True: 1},
    ],
    ids=repr,
)
def test_plain_values(value: Any) -> None:
    assert through_json(value) == value


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
)
def test_tensors(dtype: torch.dtype) -> None:
    value = {"best": torch.tensor([[0.1, 2.0], [3.0, 0.0]]).to(dtype), "scalar": torch.tensor(2)}
    back = through_json(value)
    assert back["best"].dtype is dtype
    assert torch.equal(back["best"], value["best"])
    assert back["scalar"].shape == ()


def test_what_json_cannot_hold_is_left_out() -> None:
    assert through_json({"call": print, "kept": 1}) == {"call": None, "kept": 1}
    assert through_json((1, 2)) == [1, 2]


def test_counters_stay_counters() -> None:
    assert list(through_json(Counter([3, 3, 5])).elements()) == [3, 3, 5]


def test_the_metric_of_a_checkpoint_is_what_was_logged_last() -> None:
    logged = {"val_loss": torch.tensor(0.5), "loss": torch.tensor(2.0)}
    told: list[str] = []

    def newest(name: str | None, known: dict[str, torch.Tensor]) -> Metric | None:
        return Monitored(name, is_told=True, announce=told.append).newest(8, known, 3.0)

    assert newest("val_loss", logged) == Metric(name="val_loss", value=0.5)
    assert newest("loss", logged) == Metric(name="loss", value=2.0)
    assert newest("loss", {}) == Metric(name="loss", value=3.0)
    assert newest(None, logged) is None
    assert Monitored("loss", is_told=True).newest(8, {}, None) is None
    assert told == []
    assert newest("val_loss", {}) is None
    assert len(told) == 1


def test_what_is_monitored_and_never_logged_is_told_once() -> None:
    told: list[str] = []
    for is_told in (True, False):
        monitored = Monitored("val_los", is_told=is_told, announce=told.append)
        for step in (8, 16):
            assert monitored.newest(step, {"val_loss": torch.tensor(0.5)}, 3.0) is None
    (line,) = told
    assert line.startswith("ckpt.monitor=val_los: nothing of that name was logged until step 8")
    assert line.endswith("Logged: loss, val_loss")
