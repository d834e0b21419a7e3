"""The part of a training's state that is not tensors, as JSON and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from hetero_fw.callbacks import AdaptiveCheckpoint, StepRecorder
from hetero_fw.checkpoint import Metric, from_plain, to_plain
from hetero_fw.strategies import HeteroFSDPStrategy


def collect_state(
    trainer: pl.Trainer, on_lost: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Schedulers, loss scale, callbacks and the step, as `restore_state` takes them.

    Args:
        on_lost: told what of it cannot be kept.
    """
    strategy = trainer.strategy
    assert isinstance(strategy, HeteroFSDPStrategy)
    return {
        "step": trainer.global_step,
        "schedulers": [
            to_plain(_without_callables(config.scheduler.state_dict()), on_lost, "scheduler")
            for config in trainer.lr_scheduler_configs
        ],
        "loss_scale": strategy.precision.loss_scale.state_dict(),
        "callbacks": {
            callback.state_key: to_plain(callback.state_dict(), on_lost, callback.state_key)
            for callback in _stateful_callbacks(trainer)
        },
    }


def restore_state(
    trainer: pl.Trainer, state: dict[str, Any], *, with_schedules: bool = True
) -> None:
    """Put back what `collect_state` returned; what a new configuration lacks is left out."""
    strategy = trainer.strategy
    assert isinstance(strategy, HeteroFSDPStrategy)
    schedules = state["schedulers"] if with_schedules else ()
    for config, saved in zip(trainer.lr_scheduler_configs, schedules, strict=False):
        config.scheduler.load_state_dict(from_plain(saved))
    strategy.precision.loss_scale.load_state_dict(state["loss_scale"])
    # Also those whose state is still empty: it may have been filled in the earlier attempt.
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if callback.state_key in state["callbacks"]:
            callback.load_state_dict(from_plain(state["callbacks"][callback.state_key]))
    # A schedule may follow what was logged in an earlier step. An older release did not keep it.
    device = strategy.root_device
    logged = from_plain(state.get("logged", {}))
    trainer.callback_metrics.update(
        {name: value.to(device) for name, value in logged.items() if isinstance(value, Tensor)}
    )


def known_metrics(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Copy of what is logged, as of the last time that somebody asked for it; no collective."""
    return dict(trainer._logger_connector._callback_metrics)


class Monitored:
    """The metric of checkpoints, by its name; says once that there is none of that name.

    Args:
        name: None if nothing is monitored.
        is_told: whether this rank says it.
        announce: shows a line to the user.
    """

    def __init__(
        self, name: str | None, *, is_told: bool, announce: Callable[[str], None] = print
    ) -> None:
        self.name = name
        self._is_told = is_told
        self._announce = announce

    def newest(
        self, step: int, logged: Mapping[str, Tensor], step_loss: float | None
    ) -> Metric | None:
        """As the module has logged it last before the save of `step`, else the step's loss.

        Args:
            step: that is saved.
            logged: by the module, newest values.
            step_loss: of the step; None if this attempt has made none.

        Returns:
            None if nothing is monitored, or nothing of that name is known yet.
        """
        if self.name is None:
            return None
        if self.name in logged:
            return Metric(name=self.name, value=float(logged[self.name]))
        if self.name == "loss":
            return None if step_loss is None else Metric(name=self.name, value=step_loss)
        if self._is_told:
            self._is_told = False
            self._announce(
                f"ckpt.monitor={self.name}: nothing of that name was logged until step {step}, so "
                "that the checkpoint has no metric and is never kept as one of the best. Logged: "
                f"{', '.join(['loss', *sorted(logged)])}"
            )
        return None


def _without_callables(scheduler: dict[str, Any]) -> dict[str, Any]:
    """A scheduler brings its functions with it, and keeps those that are not in its state."""
    return {key: value for key, value in scheduler.items() if not callable(value)}


def _stateful_callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    own = (AdaptiveCheckpoint, StepRecorder)
    return [
        callback
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if not isinstance(callback, own) and callback.state_dict()
    ]
