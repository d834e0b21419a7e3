"""The moment between two steps at which nothing of a training changes any more."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer
from typing_extensions import override


class StepBoundary(Callback):
    """Tells when training has come to rest after a step, and when that ends. Comes first of all.

    A step is over for callbacks before it is for the module, whose own `on_train_batch_end` may
    change weights. If a validation follows, or a schedule that looks at metrics, these belong to
    the step as well: what goes on from there does neither again. Training then rests when the next
    step begins, or where there is none, when it ends.

    Args:
        on_rest: called with the step, once for each, in this order.
        on_move: called when weights may change again.
    """

    def __init__(
        self, *, on_rest: Sequence[Callable[[int], None]], on_move: Sequence[Callable[[], None]]
    ) -> None:
        self._on_rest = on_rest
        self._on_move = on_move
        self._is_due = False

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        own_hook = pl_module.on_train_batch_end

        @functools.wraps(own_hook)
        def then_rest(*args: Any, **kwargs: Any) -> None:
            own_hook(*args, **kwargs)
            self._is_due = True
            if not _has_sequel(trainer):
                self._rest(trainer.global_step)

        pl_module.on_train_batch_end = then_rest  # type: ignore[method-assign]

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._rest(trainer.global_step)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._rest(trainer.global_step)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Averages of weights take the places of the weights themselves to be evaluated.
        self._move()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._move()

    def _rest(self, step: int) -> None:
        if self._is_due:
            self._is_due = False
            for tell in self._on_rest:
                tell(step)

    def _move(self) -> None:
        for tell in self._on_move:
            tell()


def _has_sequel(trainer: pl.Trainer) -> bool:
    """Whether more belongs to the step that has just ended. A stop goes first."""
    if trainer.should_stop:
        return False
    every = trainer.val_check_batch
    validates = (
        trainer.enable_validation and isinstance(every, int) and trainer.global_step % every == 0
    )
    return validates or any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)
