"""Where the checkpoints of a run are, and what the tools do with them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hetero_fw.app.places import checkpoint_root
from hetero_fw.app.storage_settings import local_directory, options_for_url, stored_configuration
from hetero_fw.checkpoint import (
    Likeness,
    ObjectPlace,
    PruneReport,
    StoragePath,
    TensorDifference,
    dead_directory,
    find_restorable,
    is_object_store,
    num_attempts,
    open_root,
    prefixes_in,
    prune,
    published_paths,
    runs_below,
    step_of,
)
from hetero_fw.errors import CheckpointError, ConfigError
from hetero_fw.monitoring import RunDirectory, attempt_starts, format_number, read_events
from hetero_fw.policies import AttemptStart, MonitorMode, RetentionRule

_PREFIX = "hetero_ckpt"


@dataclass(frozen=True, kw_only=True)
class CheckpointStore:
    """Where a run keeps its checkpoints, and under which rule.

    Attributes:
        root: directory of those in the storage, which all tools know.
        settings: of the run, that say what to keep besides the newest; None: nothing says so.
        local: directory of the node directories; None if the run has none. For `ls` and `verify`.
        starts: where the attempts of the run went on from, as far as that is known.
    """

    root: StoragePath
    prefix: str
    settings: Mapping[str, Any] | None
    local: Path | None = None
    starts: tuple[AttemptStart, ...] = ()

    @classmethod
    def of(cls, source: RunDirectory | str) -> CheckpointStore:
        """Of a run, as its own configuration says, with defaults where there is none; or of a URL.

        Raises:
            ConfigError: the storage cannot be set up, or needs options that are not stored.
            CheckpointError: what is named holds several runs; names them.
        """
        source = run_of(source)
        if isinstance(source, str):
            return cls._at(source)
        cfg = _configuration(source, announce=lambda text: print(text, file=sys.stderr))
        root = checkpoint_root(cfg, source)
        return cls(
            root=root,
            prefix=str(cfg.ckpt.prefix) if "prefix" in cfg.ckpt else _prefix_in(root),
            local=local_directory(cfg, source.name),
            starts=attempt_starts(read_events(source.events_path)),
            settings={
                key: cfg.ckpt.get(key)
                for key in ("keep_best", "monitor", "monitor_mode", "keep_every_n_steps")
                if key in cfg.ckpt
            }
            if cfg.ckpt
            else None,
        )

    @classmethod
    def _at(cls, location: str) -> CheckpointStore:
        root = open_root(location, options_for_url())
        store = cls(root=root, prefix=_prefix_in(root), settings=None)
        names = [] if store.paths() else runs_below(root)
        if names:
            shown = location.rstrip("/")
            raise CheckpointError(
                f"{shown} holds the checkpoints of {len(names)} run{'s'[: len(names) > 1]}: "
                f"{', '.join(names)}. Give one of them, such as {shown}/{names[0]}."
            )
        return store

    def rule(self, keep_latest_k: int) -> RetentionRule:
        """The run's rule with another number of newest ones to keep.

        Raises:
            ConfigError: a setting in its configuration is none.
        """
        settings = self.settings or {}
        mode = settings.get("monitor_mode", "min")
        if mode not in set(MonitorMode):
            raise ConfigError(f"ckpt.monitor_mode={mode} must be one of {', '.join(MonitorMode)}.")
        return RetentionRule(
            keep_latest_k=keep_latest_k,
            keep_best=settings.get("keep_best", 1),
            monitor=settings.get("monitor"),
            monitor_mode=MonitorMode(mode),
            keep_every_n_steps=settings.get("keep_every_n_steps"),
        )

    def paths(self) -> list[StoragePath]:
        """Directories of all published checkpoints, newest first."""
        return list(published_paths(self.root, self.prefix))

    def path(self, step: int) -> StoragePath:
        """Directory of the published checkpoint of `step`.

        Raises:
            CheckpointError: there is none.
        """
        paths: dict[int, StoragePath] = {}
        for path in self.paths():
            paths.setdefault(step_of(path.name, self.prefix) or 0, path)
        if step in paths:
            return paths[step]
        there_are = sorted(paths) or "none"
        raise CheckpointError(
            f"{self.root} has no checkpoint of step {step}; there are {there_are}"
        )

    def newest_intact(self) -> StoragePath:
        """Directory of the newest checkpoint of the run whose bytes are as they were written.

        Raises:
            CheckpointError: there is none; says what is wrong with the newest.
        """
        skipped: list[tuple[StoragePath, str]] = []
        info = find_restorable(
            self.root, self.prefix, lambda *found: skipped.append(found), self.starts
        )
        if info is None:
            raise CheckpointError(skipped[0][1] if skipped else f"{self.root} has no checkpoint")
        for path, reason in skipped:
            print(f"step {step_of(path.name, self.prefix)} is not used: {reason}", file=sys.stderr)
        return info.path

    def prune(self, keep: int, *, newest_only: bool = False) -> PruneReport:
        """Delete old checkpoints, as the run would with `keep_latest_k=keep`.

        Args:
            newest_only: consent to what is done where nothing says what to keep besides, nor
                whether the run goes on.

        Raises:
            CheckpointError: not every one of them was deleted, or that consent is missing, or
                given for a run that does say it. Nothing is deleted then.
        """
        if newest_only and self.settings is not None:
            raise CheckpointError(
                "--newest-only is for checkpoints without their run; the configuration of this one "
                "says what to keep besides, and that is kept"
            )
        if self.settings is None and not newest_only and self.paths():
            raise CheckpointError(
                f"nothing at {self.root} says what its run keeps besides the newest (the best, "
                "those of every n-th step) or whether it goes on: give the run directory. If that "
                "is gone and nothing saves there, --newest-only keeps the newest alone"
            )
        rule = self.rule(keep)
        if is_object_store(self.root):
            newest = max(0, num_attempts(self.root) - 1)
            return ObjectPlace.at(self.root, newest).prune(self.prefix, rule)
        if not self.root.is_dir():
            return PruneReport(reason="no checkpoints")
        try:
            into = dead_directory(self.root)
            try:
                return prune(self.root, self.prefix, rule, into=into)
            finally:
                shutil.rmtree(into, ignore_errors=True)
        except OSError as error:
            raise CheckpointError(f"not every old checkpoint was deleted: {error}") from error


def run_of(source: RunDirectory | str) -> RunDirectory | str:
    """The run whose own directory of checkpoints `source` is; `source` where it is none."""
    if isinstance(source, str) and source.startswith("file://"):
        path = Path(source.removeprefix("file://"))
        for folder in (path, path.resolve()):
            run_dir = RunDirectory(folder.parent)
            is_run = run_dir.plan_path.is_file() or run_dir.status_path.is_file()
            if is_run and folder == run_dir.checkpoints_path:
                is_own = _configuration(run_dir).ckpt.get("storage") is None
                return run_dir if is_own else source
    return source


def _prefix_in(root: StoragePath) -> str:
    """First part of the names of the checkpoints in `root`, where no configuration says it."""
    prefixes = prefixes_in(root)
    prefix = _PREFIX if _PREFIX in prefixes or not prefixes else prefixes[0]
    others = [other for other in prefixes if other != prefix]
    if others:
        print(
            f"{root} also has checkpoints named {', '.join(others)}, which are not looked at; only "
            f"{prefix} is",
            file=sys.stderr,
        )
    return prefix


def _configuration(
    run_dir: RunDirectory, announce: Callable[[str], None] = lambda text: None
) -> DictConfig:
    """That of the run, or one that says nothing; then nothing is deleted without consent."""
    try:
        cfg = stored_configuration(run_dir)
    except ConfigError as error:
        announce(f"{error}: what lies in {run_dir.checkpoints_path} is looked at")
        cfg = None
    return cfg if cfg is not None else OmegaConf.create({"ckpt": {}})


def format_difference(differences: Sequence[TensorDifference]) -> str:
    """A line for each tensor that is not equal, and a count of all kinds."""
    unequal = [item for item in differences if item.likeness is not Likeness.EQUAL]
    width = max((len(item.fqn) for item in unequal), default=0)
    lines = [f"{item.fqn:<{width}}  {_likeness(item)}" for item in unequal]
    counts = [
        f"{number} {likeness.value.replace('_', ' ')}"
        for likeness in Likeness
        if (number := sum(item.likeness is likeness for item in differences))
    ]
    return "\n".join([*lines, ", ".join(counts) or "no tensors"])


def _likeness(item: TensorDifference) -> str:
    if item.likeness is Likeness.DIFFERENT:
        return f"largest difference {format_number(item.max_abs_difference)}"
    return " ".join(filter(None, [item.likeness.value.replace("_", " "), item.detail]))
