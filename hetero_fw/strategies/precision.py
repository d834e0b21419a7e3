"""Precision by autocast, with loss scaling and clipping decided by the global gradient norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from torch.optim import Optimizer
from typing_extensions import override

from hetero_fw.hardware import Precision
from hetero_fw.parallel import DynamicLossScale, clip_factor, local_gradients, scale_gradients

_AUTOCAST = {Precision.BF16_MIXED: torch.bfloat16, Precision.FP16_MIXED: torch.float16}


class HeteroPrecision(LightningPrecision):
    """32-true, bf16-mixed and 16-mixed on sharded and plain modules.

    The strategy tells the norm of each step's gradient through `observe_norm`. A step whose norm
    is not finite changes no weight on any rank: all see the same norm, so all skip.

    Args:
        on_skipped: called when a step is skipped, with its number and the norm that was seen.
        max_skipped: steps in a row that may be skipped before training fails.
    """

    def __init__(
        self,
        *,
        precision: Precision,
        device_type: str,
        on_skipped: Callable[[int, float], None] | None = None,
        max_skipped: int = 25,
    ) -> None:
        super().__init__()
        self.precision = precision.value
        self.loss_scale = (
            DynamicLossScale() if precision is Precision.FP16_MIXED else DynamicLossScale.off()
        )
        self.norm = 0.0
        self._dtype = _AUTOCAST.get(precision)
        self._device_type = device_type
        self._on_skipped = on_skipped
        self._max_skipped = max_skipped
        self._num_skipped = 0

    @property
    def is_finite(self) -> bool:
        """Whether the gradient of the current step may be used."""
        return self.norm < float("inf")

    @property
    def loss_scale_or_none(self) -> float | None:
        """The factor on the loss, None where there is no scaling."""
        return self.loss_scale.scale if self.loss_scale.is_dynamic else None

    def observe_norm(self, scaled_norm: float) -> float:
        """Take the global norm of the still scaled gradients; returns the norm without scale."""
        self.norm = scaled_norm / self.loss_scale.scale
        return self.norm

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        if self._dtype is None:
            yield
            return
        with torch.autocast(self._device_type, dtype=self._dtype):
            yield

    @override
    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Steppable,
        model: pl.LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        result = closure()
        if not self.is_finite:
            self._skip(optimizer, step=model.trainer.global_step + 1)
            return result
        self._num_skipped = 0
        if self.loss_scale.scale != 1.0:
            scale_gradients(_gradients(optimizer), 1.0 / self.loss_scale.scale)
        self._after_closure(model, optimizer)
        self.loss_scale.update(is_finite=True)
        optimizer.step(**kwargs)
        return result

    def _skip(self, optimizer: Steppable, *, step: int) -> None:
        """Drop the gradients: a zero gradient would still move weights through momentum."""
        for group in optimizer.param_groups:  # type: ignore[attr-defined]
            for parameter in group["params"]:
                parameter.grad = None
        self.loss_scale.update(is_finite=False)
        self._num_skipped += 1
        if self._on_skipped is not None:
            self._on_skipped(step, self.norm)
        if self._num_skipped > self._max_skipped:
            raise FloatingPointError(
                f"the gradient was not finite in {self._num_skipped} steps in a row; the model "
                "does not train at this learning rate, precision or data"
            )

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        scale_gradients(_gradients(optimizer), clip_factor(self.norm, float(clip_val)))


def _gradients(optimizer: Any) -> list[torch.Tensor]:
    return local_gradients(p for group in optimizer.param_groups for p in group["params"])
