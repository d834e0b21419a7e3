"""Fill a training with the checkpoint that it continues from."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from hetero_fw.app.checkpoint_hooks import tell_hooks
from hetero_fw.app.context import RankContext
from hetero_fw.app.optimizer_settings import Changes, OptimizerSettings
from hetero_fw.app.state import restore_state
from hetero_fw.checkpoint import (
    DamagedCheckpointError,
    FoundCheckpoint,
    misfits,
    restore_found_state,
)
from hetero_fw.errors import ConfigError
from hetero_fw.monitoring import EventName


@dataclass(frozen=True, kw_only=True)
class Wasted:
    """What was read of checkpoints of this attempt that turned out damaged.

    Attributes:
        num_bytes: by all ranks.
        read_s: time that it took.
    """

    num_bytes: int = 0
    read_s: float = 0.0

    def plus(self, damage: DamagedCheckpointError) -> Wasted:
        return Wasted(
            num_bytes=self.num_bytes + damage.bytes_read, read_s=self.read_s + damage.read_s
        )


class Restore(Callback):
    """Fills module, optimizer and trainer from the checkpoint, once they are set up.

    Attributes:
        damage: what made that impossible, on all ranks; what was built then holds parts of the
            checkpoint and must not be used.
    """

    def __init__(self, context: RankContext, found: FoundCheckpoint | None, wasted: Wasted) -> None:
        self._context = context
        self._found = found
        self._wasted = wasted
        self._settings: OptimizerSettings | None = None
        self.damage: DamagedCheckpointError | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not on_train_start, which does not come where the last step is complete already.
        self._settings = OptimizerSettings.of(trainer)
        if self._found is None:
            return
        _check_same_model(pl_module, self._found)
        began_s = time.perf_counter()
        try:
            state, filled = restore_found_state(pl_module, trainer.optimizers[0], self._found)
        except DamagedCheckpointError as error:
            self.damage = error
            raise
        changes = self._restore_rest(trainer, state)
        _keep_metric(trainer, self._found)
        if self._context.rank == 0:
            if changes.told:
                print(
                    f"optim, changed since the checkpoint of step {self._found.step} and used from "
                    f"there on: {', '.join(changes.told)}",
                    flush=True,
                )
            if not state.get("optimizer"):
                print(
                    f"the checkpoint of step {self._found.step} holds weights only: the optimizer "
                    "begins with an empty state",
                    flush=True,
                )
            self._context.events.write(
                EventName.RESTORED,
                step=self._found.step,
                source=", ".join(filled.sources) or self._found.path,
                tiers=list(filled.tiers),
                bytes_read=self._wasted.num_bytes + filled.bytes_read,
                size_bytes=filled.size_bytes,
                read_s=self._wasted.read_s + time.perf_counter() - began_s,
            )

    def _restore_rest(self, trainer: pl.Trainer, state: dict[str, Any]) -> Changes:
        """What is no tensor; but where the configuration of the optimizer has changed, that."""
        assert self._settings is not None
        saved = state["callbacks"].get(self.state_key)
        changes = Changes()
        if saved is not None and state.get("optimizer"):
            changes = self._settings.changes_since(saved)
        restore_state(trainer, state, with_schedules=not changes.is_rescheduled)
        tell_hooks(trainer, state)
        counts = [schedule.get("last_epoch", state["step"]) for schedule in state["schedulers"]]
        self._settings.apply(trainer, changes, max(counts, default=state["step"]))
        return changes

    @override
    def state_dict(self) -> dict[str, Any]:
        # To tell later what the configuration has changed since.
        return self._settings.kept() if self._settings is not None else {}


def _keep_metric(trainer: pl.Trainer, found: FoundCheckpoint) -> None:
    """Where no step follows, what the checkpoint was worth stays known if it is saved again."""
    metric = found.manifest.metric
    if metric is not None and found.step >= trainer.max_steps:
        trainer.callback_metrics[metric.name] = torch.tensor(metric.value)


def _check_same_model(module: pl.LightningModule, found: FoundCheckpoint) -> None:
    """Refuse to continue a run with another model than it was started with."""
    changes = misfits(module, found.manifest)
    if changes:
        more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
        raise ConfigError(
            f"model.module is not the model that {found.path} holds: "
            f"{'; '.join(changes[:3])}{more}. "
            "Choose another run_name for another model."
        )
