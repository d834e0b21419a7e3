"""A finite gradient is unscaled, clipped and applied; any other changes nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from hetero_fw.hardware import Precision
from hetero_fw.strategies import HeteroPrecision


class Parameter(pl.LightningModule):
    """One weight vector; Lightning's hooks do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))


class Case:
    """A plugin, an optimizer with momentum, and what was reported as skipped."""

    def __init__(self, precision: Precision, **options: Any) -> None:
        self.skipped: list[tuple[int, float]] = []
        self.module = Parameter()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1.0, momentum=0.9)
        self.plugin = HeteroPrecision(
            precision=precision,
            device_type="cpu",
            on_skipped=lambda step, norm: self.skipped.append((step, norm)),
            **options,
        )
        # Only clipping is Lightning's business here, and it goes through the plugin itself.
        self.plugin._after_closure = self._clip  # type: ignore[method-assign]
        self.clip_at: float | None = None

    def _clip(self, model: Any, optimizer: Any) -> None:
        if self.clip_at is not None:
            self.plugin.clip_grad_by_norm(optimizer, self.clip_at)

    def step(self, gradient: list[float], number: int = 0) -> None:
        """Apply `gradient`, given without the loss scale."""
        scaled = torch.tensor(gradient) * self.plugin.loss_scale.scale

        def closure() -> None:
            self.module.weight.grad = scaled.clone()
            self.plugin.observe_norm(float(scaled.double().norm()))

        model: Any = SimpleNamespace(trainer=SimpleNamespace(global_step=number))
        self.plugin.optimizer_step(self.optimizer, model, closure)

    @property
    def weight(self) -> list[float]:
        return [float(value) for value in self.module.weight.detach()]


@pytest.mark.parametrize("precision", list(Precision))
def test_gradient_is_applied_without_the_scale(precision: Precision) -> None:
    case = Case(precision)
    case.step([0.5, 0.25])
    assert case.weight == [0.5, 1.75]
    assert case.plugin.norm == pytest.approx(0.3125**0.5)
    assert not case.skipped


def test_only_float16_has_a_scale() -> None:
    assert Case(Precision.FP16_MIXED).plugin.loss_scale_or_none == 2.0**16
    assert Case(Precision.BF16_MIXED).plugin.loss_scale_or_none is None
    assert Case(Precision.FP32).plugin.loss_scale_or_none is None


def test_clipping_sees_the_norm_without_the_scale() -> None:
    case = Case(Precision.FP16_MIXED)
    case.clip_at = 1.0
    case.step([3.0, 4.0])
    assert case.weight == pytest.approx([1.0 - 0.6, 2.0 - 0.8], rel=1e-5)


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_step_that_is_not_finite_changes_nothing(precision: Precision, value: float) -> None:
    case = Case(precision)
    case.step([0.5, 0.25])
    before = case.weight
    case.step([value, 0.0], number=41)
    # Neither gradient nor momentum moved it.
    assert case.weight == before
    assert [step for step, _ in case.skipped] == [42]
    if precision is Precision.FP16_MIXED:
        assert case.plugin.loss_scale.scale == 2.0**15


def test_too_many_skipped_steps_in_a_row_are_an_error() -> None:
    case = Case(Precision.FP32, max_skipped=2)
    for value in (float("nan"), 0.0, float("nan"), float("nan")):
        case.step([value, 0.0])
    with pytest.raises(FloatingPointError, match="3 steps in a row"):
        case.step([float("nan"), 0.0])


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (Precision.FP32, torch.float32),
        (Precision.BF16_MIXED, torch.bfloat16),
        (Precision.FP16_MIXED, torch.float16),
    ],
)
def test_products_have_the_precision(precision: Precision, dtype: torch.dtype) -> None:
    with Case(precision).plugin.forward_context():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype
