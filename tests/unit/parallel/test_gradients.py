"""Norms and factors that clipping is made of."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hetero_fw.parallel import clip_factor, local_gradients, scale_gradients, squared_norm


def test_squared_norm_is_that_of_all_gradients_together() -> None:
    grads = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]]), torch.tensor([12.0])]
    assert squared_norm(grads) == pytest.approx(169.0)
    assert squared_norm([]) == 0.0


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_squared_norm_of_what_is_not_finite(value: float) -> None:
    assert not math.isfinite(squared_norm([torch.ones(3), torch.tensor([1.0, value])]))


def test_squared_norm_of_large_half_precision_gradients() -> None:
    # The square of 60000 is no half precision number.
    assert squared_norm([torch.full((1,), 60000.0, dtype=torch.float16)]) == pytest.approx(3.6e9)


def test_local_gradients_passes_over_what_has_none() -> None:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), nn.Parameter()]
    parameters[1].grad = torch.ones(2)
    parameters[2].grad = torch.empty(0)
    assert [grad.tolist() for grad in local_gradients(parameters)] == [[1.0, 1.0]]


@pytest.mark.parametrize(("norm", "max_norm"), [(10.0, 1.0), (2.0, 1.0), (0.5, 1.0), (0.0, 1.0)])
def test_clip_factor_brings_the_norm_below_the_limit(norm: float, max_norm: float) -> None:
    factor = clip_factor(norm, max_norm)
    assert factor * norm <= max_norm
    assert factor == pytest.approx(min(1.0, max_norm / norm) if norm else 1.0, rel=1e-5)


def test_clipping_is_that_of_torch() -> None:
    torch.manual_seed(0)
    theirs = [nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(3, 2))]
    for parameter in theirs:
        parameter.grad = torch.randn_like(parameter) * 7
    ours = [parameter.grad.clone() for parameter in theirs if parameter.grad is not None]
    nn.utils.clip_grad_norm_(theirs, 1.5)
    scale_gradients(ours, clip_factor(squared_norm(ours) ** 0.5, 1.5))
    for parameter, grad in zip(theirs, ours, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_scale_by_one_and_of_nothing() -> None:
    grads = [torch.ones(2)]
    scale_gradients(grads, 1.0)
    scale_gradients([], 0.5)
    assert grads[0].tolist() == [1.0, 1.0]
