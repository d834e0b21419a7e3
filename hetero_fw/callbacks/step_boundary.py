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
    step begins, or where there is none, when it ends. A step begins when its batch is there: the
    first hook that belongs to it is the module's `on_before_batch_transfer`, where it may draw
    random numbers, and change what it adds to checkpoints.

    Args:
        on_rest: called with the step, once for each, in this order.
        on_end: called with the step that training ends after, once it rests.
        on_move: called when weights may change again.
        on_start: called before what hooks do at the start of training, after a restore.
        on_batch: called before what hooks do with the batch of a step that begins.
    """

    def __init__(
        self,
        *,
        on_rest: Sequence[Callable[[int], None]],
        on_end: Callable[[int], None],
        on_move: Sequence[Callable[[], None]],
        on_start: Callable[[], None],
        on_batch: Callable[[], None],
    ) -> None:
        self._on_rest = on_rest
        self._on_end = on_end
        self._on_move = on_move
        self._on_start = on_start
        self._on_batch = on_batch
        self._is_due = False

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # No callback is told of these moments.
        hooks = pl_module.on_before_batch_transfer, pl_module.on_train_batch_end
        pl_module.on_before_batch_transfer = self._begin_before(hooks[0], trainer)  # type: ignore[method-assign]
        pl_module.on_train_batch_end = self._rest_after(hooks[1], trainer)  # type: ignore[method-assign]

    def _begin_before(self, hook: Callable[..., Any], trainer: pl.Trainer) -> Callable[..., Any]:
        @functools.wraps(hook)
        def begin(*args: Any, **kwargs: Any) -> Any:
            if trainer.training:  # batches of a validation come here as well
                self._rest(trainer.global_step)
                self._on_batch()
            return hook(*args, **kwargs)

        return begin

    def _rest_after(self, hook: Callable[..., Any], trainer: pl.Trainer) -> Callable[..., None]:
        @functools.wraps(hook)
        def then_rest(*args: Any, **kwargs: Any) -> None:
            hook(*args, **kwargs)
            self._is_due = True
            if not _has_sequel(trainer):
                self._rest(trainer.global_step)

        return then_rest

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._on_start()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._rest(trainer.global_step)
        self._on_end(trainer.global_step)
        self._move()  # what other callbacks do here may change weights

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
