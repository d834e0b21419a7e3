"""Refuse what a run is to use and cannot: storage that takes nothing, weights that are none."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from hetero_fw.app.kept import finished_step
from hetero_fw.app.storage_settings import StoredRun, local_directory
from hetero_fw.errors import CheckpointError, ConfigError
from hetero_fw.monitoring import RunDirectory
from hetero_fw.policies import IntervalPolicy, StorageErrorKind

if TYPE_CHECKING:
    from hetero_fw.checkpoint import StoragePath

# Of these the attempt itself waits for the end, or an old checkpoint makes room.
_MAY_PASS = frozenset({StorageErrorKind.FULL, StorageErrorKind.TRANSIENT, StorageErrorKind.UNKNOWN})


def check_usable(cfg: DictConfig, previous: RunDirectory | None, stored: StoredRun) -> None:
    """Before any process starts, try what every attempt would fail with.

    Args:
        previous: the run directory, if it is there already.
        stored: what is kept of the run.

    Raises:
        ConfigError: checkpoints cannot be kept where they are to go, `model.init_from` is no file
            of weights, or the module's own optimizer is not supported. Names each.
    """
    if cfg.mode != "train" or (previous is not None and finished_step(cfg, previous) is not None):
        return
    problems = [*_places(cfg, previous), *_initial_weights(cfg, stored), *_optimizer(cfg)]
    ConfigError.collect(problems)


def _places(cfg: DictConfig, previous: RunDirectory | None) -> Iterator[str]:
    if cfg.ckpt.policy == IntervalPolicy.NONE:
        return
    name = previous.name if previous is not None else cfg.run_name or ".new"
    if cfg.ckpt.storage is not None:
        from hetero_fw.app.places import storage_root  # takes torch

        problem = _unusable(storage_root(cfg, name))
        if problem:
            yield f"ckpt.storage={cfg.ckpt.storage}: {problem} Choose another place."
    elif previous is not None:
        # A new run directory is tried when it is made; this may be a link to another disk.
        problem = _unusable(previous.checkpoints_path)
        if problem:
            yield (
                f"run_name={name}, whose checkpoints are in {previous.checkpoints_path}: {problem} "
                "Bring back what was there, or choose another run_name."
            )
    local = local_directory(cfg, name)
    # One that refuses is done without, as on a node whose disk is broken; this is a mistake.
    existing = _existing(local) if local is not None else None
    if existing is not None and not existing.is_dir():
        yield (
            f"ckpt.tiers.local={cfg.ckpt.tiers.local}: {existing} is not a directory. Choose "
            "another place, or null for none."
        )


def _unusable(root: StoragePath) -> str:
    """Why no checkpoint can be kept at `root`; "" if one can, or if that is not certain."""
    # Takes torch, as everything does from here on.
    from hetero_fw.app.places import LOOK_TIMEOUT_S, within
    from hetero_fw.checkpoint import classify, is_object_store

    if is_object_store(root):
        return ""  # to put something there takes a login for writing, which a look does not prove
    try:
        return within(LOOK_TIMEOUT_S, lambda: _try_out(root))
    except OSError as error:
        hangs = isinstance(error, TimeoutError) and error.errno is None
        if not hangs and classify(error).kind in _MAY_PASS:
            return ""
        return f"cannot keep checkpoints in {root} ({error.strerror or error})."


def _try_out(root: Path) -> str:
    """Make a directory where the first one would be made, and remove it again."""
    existing = _existing(root)
    if not existing.is_dir():
        return f"{existing} is not a directory."
    trial = existing / f".trial-{secrets.token_hex(4)}"
    trial.mkdir()
    trial.rmdir()
    return ""


def _existing(path: Path) -> Path:
    """`path` or the nearest of its parents that is there."""
    return next(parent for parent in (path, *path.parents) if os.path.lexists(parent))


def _initial_weights(cfg: DictConfig, stored: StoredRun) -> Iterator[str]:
    if cfg.model.init_from is None or stored.checkpoints:
        return  # only a fresh run reads them
    from hetero_fw.app.build import build_without_values  # takes torch
    from hetero_fw.checkpoint import check_weights_file

    try:
        check_weights_file(Path(cfg.model.init_from).expanduser(), build_without_values(cfg))
    except CheckpointError as error:
        yield f"model.init_from: {error}"


def _optimizer(cfg: DictConfig) -> Iterator[str]:
    if cfg.optim.optimizer is not None:
        return  # nothing that the module could have instead is used
    from hetero_fw.app.build import optimizer_problem  # takes torch

    problem = optimizer_problem(cfg)
    if problem:
        yield problem
