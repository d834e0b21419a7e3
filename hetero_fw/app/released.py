"""Checkpoints that an earlier configuration of a run has kept, and the one of now does not."""

from __future__ import annotations

from omegaconf import DictConfig

from hetero_fw.app.storage_settings import StoredRun, steps_of, stored_configuration
from hetero_fw.errors import ConfigError
from hetero_fw.monitoring import RunDirectory

_KEYS = ("keep_every_n_steps", "keep_best", "monitor", "monitor_mode")


def warn_of_released(cfg: DictConfig, previous: RunDirectory | None, stored: StoredRun) -> str:
    """A warning, if checkpoints go because a key of retention was changed or left out; else "".

    Args:
        previous: the run directory, if it is there already.
        stored: what the places hold that the configuration names now.
    """
    try:
        before = stored_configuration(previous) if previous is not None else None
    except ConfigError:  # told by whoever needs it more
        return ""
    if before is None:
        return ""
    changed = [key for key in _KEYS if before.ckpt.get(key) != cfg.ckpt.get(key)]
    steps = steps_of(stored.checkpoints)[: -cfg.ckpt.keep_latest_k]
    if not changed or not steps:
        return ""
    was = ", ".join(f"ckpt.{key}={_told(before.ckpt.get(key))}" for key in changed)
    return (
        f"Warning: this run had {was}. What that has kept of the steps "
        f"{', '.join(map(str, steps))} and the configuration of now does not is deleted once newer "
        "ones are saved."
    )


def _told(value: object) -> str:
    return "null" if value is None else str(value)
