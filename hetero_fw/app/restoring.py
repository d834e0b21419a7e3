"""Find the checkpoint that an attempt continues from, and fill the training with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from hetero_fw.app.context import RankContext
from hetero_fw.app.state import restore_state
from hetero_fw.checkpoint import (
    canonical_fqn,
    claim_attempt,
    find_restorable,
    read_manifest,
    restore_training_state,
)
from hetero_fw.errors import ConfigError
from hetero_fw.monitoring import EventLog, EventName
from hetero_fw.policies import IntervalPolicy


def agree_on_checkpoint(context: RankContext) -> Path | None:
    """Rank 0 finds the newest checkpoint that verifies; all ranks use that one."""
    found: list[str | None] = [None]
    if context.rank == 0:
        root, prefix = context.run_dir.checkpoints_path, context.cfg.ckpt.prefix
        if context.cfg.ckpt.policy != IntervalPolicy.NONE or root.is_dir():
            # First of all: no earlier attempt changes anything from here on, and a replacement
            # that was cut short in the middle is put back.
            claim_attempt(root, context.attempt)
        info = find_restorable(root, prefix, on_rejected=_log_rejected(context.events))
        found = [str(info.path) if info is not None else None]
        if context.attempt > 0:
            print(f"continuing from {info.path.name if info else 'step 0'}", flush=True)
    if context.group is not None:
        dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        _check_fresh_start(context)
        return None
    return Path(found[0])


def _check_fresh_start(context: RankContext) -> None:
    """Refuse to start over what `resume=must` wants continued; the supervisor saw checkpoints."""
    if context.cfg.resume == "must":
        raise ConfigError(
            f"resume=must, but no checkpoint in {context.run_dir.checkpoints_path} could be "
            "verified; events.jsonl has a checkpoint_rejected for each. Use resume=auto to start "
            "fresh."
        )


def _log_rejected(events: EventLog) -> Callable[[Path, str], None]:
    def log(path: Path, reason: str) -> None:
        step = int(path.name.rpartition("-")[2])
        events.write(EventName.CHECKPOINT_REJECTED, step=step, path=str(path), reason=reason)
        print(f"checkpoint rejected: {reason}", flush=True)

    return log


class Restore(Callback):
    """Fills module, optimizer and trainer from a checkpoint once they are set up."""

    def __init__(self, context: RankContext, path: Path | None, step: int) -> None:
        self._context = context
        self._path = path
        self._step = step

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not on_train_start, which does not come where the last step is complete already.
        if self._path is None:
            return
        _check_same_model(pl_module, self._path)
        state = restore_training_state(
            pl_module,
            trainer.optimizers[0],
            self._path,
            process_group=self._context.group,
        )
        restore_state(trainer, state)
        if self._context.rank == 0:
            self._context.events.write(EventName.RESTORED, step=self._step, source=str(self._path))


def _check_same_model(module: pl.LightningModule, path: Path) -> None:
    """Refuse to continue a run with another model than it was started with."""
    saved = {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in read_manifest(path).tensors.items()
        if name.startswith("model.")
    }
    here = {canonical_fqn(name): tuple(p.shape) for name, p in module.named_parameters()}
    changes = [
        f"{name} is {here.get(name, 'absent')}, was {saved.get(name, 'absent')}"
        for name in sorted(here.keys() | (saved.keys() - _buffers(module)))
        if here.get(name) != saved.get(name)
    ]
    if changes:
        more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
        raise ConfigError(
            f"model.module is not the model that {path} holds: {'; '.join(changes[:3])}{more}. "
            "Choose another run_name for another model."
        )


def _buffers(module: pl.LightningModule) -> set[str]:
    """Names of the module's buffers, as checkpoints have them."""
    return {canonical_fqn(name) for name, _ in module.named_buffers()}
