"""`on_save_checkpoint` and `on_load_checkpoint` of modules and callbacks, as Lightning has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from hetero_fw.checkpoint import from_plain, to_plain
from hetero_fw.errors import CheckpointError

_Owner = pl.LightningModule | pl.Callback


def savers(trainer: pl.Trainer) -> list[_Owner]:
    """Those that want to add something to every checkpoint."""
    return _owners(trainer, "on_save_checkpoint")


def ask_hooks(trainer: pl.Trainer, on_lost: Callable[[str], None] | None = None) -> dict[str, Any]:
    """What they add, as JSON values. Called by all ranks.

    The weights are no part of what they get: those are kept by another way. What they write in the
    place of something that they get is not kept.

    Args:
        on_lost: told what is not kept.

    Raises:
        CheckpointError: one has raised; names it.
    """
    owners = savers(trainer)
    if not owners:
        return {}
    given = _basics(trainer)
    checkpoint = dict(given)
    for owner in owners:
        _call(owner, "on_save_checkpoint", trainer, checkpoint)
        for key in _overwritten(checkpoint, _basics(trainer)):
            if on_lost is not None:
                on_lost(f"what on_save_checkpoint of {type(owner).__name__} puts in {key!r}")
    added = {key: value for key, value in checkpoint.items() if key not in given}
    return {"hooks": to_plain(added, on_lost, "on_save_checkpoint")}


def tell_hooks(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """Give back what `ask_hooks` has put into `state`, if it did.

    Raises:
        CheckpointError: a hook has raised; names it.
    """
    if "hooks" not in state:
        return
    checkpoint = _basics(trainer) | from_plain(state["hooks"])
    for owner in _owners(trainer, "on_load_checkpoint"):
        _call(owner, "on_load_checkpoint", trainer, checkpoint)


def _owners(trainer: pl.Trainer, hook: str) -> list[_Owner]:
    module = trainer.lightning_module
    overriding: list[_Owner] = [
        callback
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if getattr(type(callback), hook) is not getattr(pl.Callback, hook)
    ]
    if getattr(type(module), hook) is not getattr(pl.LightningModule, hook):
        overriding.append(module)
    return overriding


def _basics(trainer: pl.Trainer) -> dict[str, Any]:
    return {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": pl.__version__,
        "state_dict": {},
        "loops": {},
        "callbacks": {},
        "optimizer_states": [],
        "lr_schedulers": [],
    }


def _overwritten(checkpoint: dict[str, Any], given: dict[str, Any]) -> list[str]:
    """Keys of `given` that hold something else in `checkpoint`."""
    # A tensor says of each of its elements whether it is equal.
    return [
        key
        for key, value in given.items()
        if key in checkpoint
        and (type(checkpoint[key]) is not type(value) or checkpoint[key] != value)
    ]


def _call(owner: _Owner, hook: str, trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    arguments: tuple[Any, ...] = (checkpoint,)
    if isinstance(owner, pl.Callback):
        arguments = (trainer, trainer.lightning_module, checkpoint)
    try:
        getattr(owner, hook)(*arguments)
    except Exception as error:
        raise CheckpointError(
            f"{hook} of {type(owner).__name__}: {type(error).__name__}: {error}"
        ) from error
