"""Checkpoints of a run in a place that its configuration no longer names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from hetero_fw.app.kept import finished_step
from hetero_fw.app.storage_settings import (
    StoredRun,
    local_directory,
    newest_step,
    node_directories,
    published_names,
    storage_location,
    stored_configuration,
)
from hetero_fw.errors import ConfigError
from hetero_fw.monitoring import RunDirectory, read_events, saves_on_line
from hetero_fw.policies import Tier


@dataclass(frozen=True, kw_only=True)
class _LeftPlace:
    """Where an earlier attempt has saved under which name, the newest step, the way back to it."""

    where: str
    step: int
    override: str
    prefix: str


def check_left_places(cfg: DictConfig, previous: RunDirectory | None, stored: StoredRun) -> str:
    """Do not begin at step 0 because the configuration names another place than before.

    Args:
        previous: the run directory, if it is there already.
        stored: what the places hold that the configuration names now.

    Returns:
        A warning, if what was left is newer than what the run goes on from, or if that cannot be
        said; "" otherwise.

    Raises:
        ConfigError: there are checkpoints where the run has kept them, and none where it looks;
            or any at all under `resume=never`; or nothing says where it has kept them.
    """
    if previous is None or cfg.mode != "train":
        return ""
    if cfg.resume == "never":
        _refuse_to_leave(cfg, previous)
        return ""
    if finished_step(cfg, previous) is not None:
        return ""
    now = storage_location(cfg, previous.name) or previous.checkpoints_path
    step = newest_step(stored.checkpoints)
    try:
        places = list(_left_places(cfg, previous))
    except ConfigError as error:
        if stored.checkpoints:
            return f"Warning: {error}. It is written anew; this run goes on from step {step}."
        raise ConfigError(
            f"{error}, so that nothing says where run_name={previous.name} has its checkpoints, "
            f"and there is none in {now}. Put that file right, or delete it if there are none."
        ) from error
    left = max(places, key=lambda place: place.step, default=None)
    if left is None or left.step <= step:
        lost = 0 if stored.checkpoints else _saved_step(previous, *Tier)
        gone = f"Warning: step {lost} was saved, but no checkpoint is left in {now}: this run "
        return f"{gone}begins at step 0 again." if lost else ""
    if stored.checkpoints:
        return (
            f"Warning: {left.where} holds step {left.step} of this run, which goes on from step "
            f"{step} now. With {left.override} it would go on from there."
        )
    raise ConfigError(
        f"run_name={previous.name} has its checkpoints in {left.where}, the newest of step "
        f"{left.step}, but there is none{_named(cfg, left)} in {now}, so that it would begin at "
        f"step 0 again. To go on from step {left.step}, set {left.override}, or copy them; to "
        "begin again, choose another run_name."
    )


def _named(cfg: DictConfig, left: _LeftPlace) -> str:
    """Says of which name there is none, where those that were left have another one."""
    return f" named {cfg.ckpt.prefix}-step-..." if left.prefix != cfg.ckpt.prefix else ""


def _refuse_to_leave(cfg: DictConfig, previous: RunDirectory) -> None:
    """`resume=never` begins no second run where one has been, wherever its checkpoints lie."""
    names = published_names(previous.checkpoints_path, "*")
    own = _LeftPlace(
        where=str(previous.checkpoints_path),
        step=newest_step(names),
        override="ckpt.storage=null",
        prefix=cfg.ckpt.prefix,
    )
    left = max((own, *_left_places(cfg, previous)), key=lambda place: place.step)
    if left.step > 0:
        raise ConfigError(
            f"resume=never, but run_name={previous.name} has checkpoints of an earlier run in "
            f"{left.where}, the newest of step {left.step}. Choose another run_name, or "
            f"resume=auto with {left.override} to go on from there."
        )


def _left_places(cfg: DictConfig, previous: RunDirectory) -> Iterator[_LeftPlace]:
    before = stored_configuration(previous)
    if before is None:
        return
    prefix = str(before.ckpt.get("prefix", cfg.ckpt.prefix))
    has_other_prefix = prefix != cfg.ckpt.prefix
    also = f" ckpt.prefix={prefix}" if has_other_prefix else ""
    location = storage_location(before, previous.name)
    if has_other_prefix or location != storage_location(cfg, previous.name):
        key = before.ckpt.get("storage")
        yield _LeftPlace(
            where=str(location or previous.checkpoints_path),
            step=_stored_step(previous, location, prefix),
            override=f"ckpt.storage={'null' if key is None else key}{also}",
            prefix=prefix,
        )
    local = local_directory(before, previous.name)
    if local is not None and (has_other_prefix or local != local_directory(cfg, previous.name)):
        names = [n for node in node_directories(local) for n in published_names(node, prefix)]
        yield _LeftPlace(
            where=str(local),
            step=newest_step(names),
            override=f"ckpt.tiers.local={local.parent}{also}",
            prefix=prefix,
        )


def _stored_step(previous: RunDirectory, location: str | None, prefix: str) -> int:
    """The newest one that is there; on a remote storage, which may be gone, that was saved."""
    if location is not None and "://" in location:
        return _saved_step(previous, Tier.STORAGE)
    root = Path(location) if location is not None else previous.checkpoints_path
    return newest_step(published_names(root, prefix))


def _saved_step(previous: RunDirectory, *tiers: Tier) -> int:
    events = read_events(previous.events_path)
    saves = [event for tier in tiers for event in saves_on_line(events, tier)]
    return max((event["step"] for event in saves), default=0)
