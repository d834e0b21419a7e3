"""A model that states no costs gets them from its parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetero_fw.app.estimate import estimate_workload


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.first = nn.Linear(4, 5)
        self.blocks = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
        self.activation = nn.ReLU()


def test_every_parameter_is_counted_once() -> None:
    model = Model()
    workload = estimate_workload(model)
    assert workload.is_estimated
    assert workload.name == "Model"
    assert {layer.name: layer.num_params for layer in workload.layers} == {
        "first": 25,
        "blocks": 12,
        "": 3,
    }
    assert workload.num_params == sum(p.numel() for p in model.parameters())
    assert workload.flops_per_sample == pytest.approx(6 * workload.num_params)
    assert workload.activation_bytes_per_sample > 0


def test_model_without_parameters_costs_nothing() -> None:
    assert estimate_workload(nn.ReLU()).num_params == 0
