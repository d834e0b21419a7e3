"""What is kept of a run when it ends, for whoever reads its last lines."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from hetero_fw.app.storage_settings import (
    local_directory,
    node_directories,
    published_names,
    steps_of,
)
from hetero_fw.errors import CheckpointError, ConfigError
from hetero_fw.monitoring import (
    EventName,
    RunDirectory,
    Status,
    committed_saves,
    read_events,
    read_status,
    rejected_steps,
    saves_on_line,
)
from hetero_fw.policies import IntervalPolicy, Tier

if TYPE_CHECKING:
    from hetero_fw.checkpoint import StoragePath
    from hetero_fw.recovery import RunOutcome

# A run that has ended does not wait long for a storage that hangs.
_LOOK_TIMEOUT_S = 10.0


def finished_step(cfg: DictConfig, run_dir: RunDirectory) -> int | None:
    """The step a run has ended with that leaves nothing to do; None if something is left."""
    step = trained_step(cfg, run_dir)
    return None if step is None or what_is_left(cfg, run_dir, step) else step


def trained_step(cfg: DictConfig, run_dir: RunDirectory) -> int | None:
    """The step a run has ended with that leaves nothing to train; None if something is left."""
    status = read_status(run_dir.status_path)
    if status is None or status.status is not Status.DONE:
        return None
    is_enough = max(status.step, _asked_steps(run_dir)) >= int(cfg.trainer.max_steps)
    return status.step if is_enough else None


def _asked_steps(run_dir: RunDirectory) -> int:
    """The `trainer.max_steps` that the run has ended with, which may have been long before it."""
    ends = [e for e in read_events(run_dir.events_path) if e["event"] == EventName.RUN_END]
    return int(ends[-1].get("max_steps", 0)) if ends else 0


def tell_end(cfg: DictConfig, outcome: RunOutcome) -> str:
    """Why a run ends as it does; of one that is DONE, if that was before `trainer.max_steps`."""
    if outcome.status is not Status.DONE or outcome.step >= cfg.trainer.max_steps:
        return outcome.reason
    return f"training ended itself before trainer.max_steps={cfg.trainer.max_steps}"


def what_is_left(cfg: DictConfig, run_dir: RunDirectory, step: int) -> str:
    """What there is to do for a run that has trained to `step`; "" if nothing."""
    if cfg.ckpt.policy == IntervalPolicy.NONE:
        return ""
    events = read_events(run_dir.events_path)
    if _awaits_storage(cfg, run_dir, events, step):
        return "which the storage lacks: it goes there now"
    if _is_lost(events, step):
        return "but no save of it has succeeded: what no checkpoint holds is trained again"
    return ""


def _is_lost(events: Sequence[Mapping[str, Any]], step: int) -> bool:
    """Whether `step` was to be saved and never reached the storage.

    What was there once is the user's to delete; a log that is gone says nothing.
    """
    attempts = (EventName.CHECKPOINT_STARTED, EventName.CHECKPOINT_FAILED)
    was_tried = any(e["event"] in attempts and e.get("step") == step for e in events)
    return was_tried and step not in _stored_steps(events)


def _stored_steps(events: Sequence[Mapping[str, Any]]) -> set[int]:
    """Steps that the storage had, by the log: saved there, or those the run went on from last."""
    restored = [event for event in events if event["event"] == EventName.RESTORED][-1:]
    found = [event for event in restored if Tier.STORAGE in event.get("tiers", ())]
    return {event["step"] for event in (*saves_on_line(events, Tier.STORAGE), *found)}


def _awaits_storage(
    cfg: DictConfig, run_dir: RunDirectory, events: Sequence[Mapping[str, Any]], step: int
) -> bool:
    """Whether the checkpoint of the last step is whole on the nodes, and not in the storage.

    Only as far as this host sees it: an attempt that did not find it would train again.
    """
    local = local_directory(cfg, run_dir.name)
    if local is None or not node_directories(local):
        return False
    if step in _stored_steps(events):
        return False
    return step in _steps_on_nodes(cfg, local)


def _steps_on_nodes(cfg: DictConfig, local: Path) -> set[int]:
    # Takes torch: only where a run has left something on its nodes.
    from hetero_fw.checkpoint import examine_node_copies, find_node_copies

    return {
        copies.step
        for copies in find_node_copies(local, cfg.ckpt.prefix)
        if copies.manifest is not None
        and not examine_node_copies(copies, reads_bytes=False).missing
    }


def tell_what_is_kept(cfg: DictConfig, run_dir: RunDirectory, outcome: RunOutcome) -> str:
    """What is kept of the run, where that is not what its end leads to expect."""
    events = read_events(run_dir.events_path)
    if outcome.status is not Status.DONE:
        return _tell_restart(cfg, run_dir, events)
    stored = max(_stored_steps(events), default=0)
    if cfg.ckpt.policy == IntervalPolicy.NONE or stored >= outcome.step:
        return ""
    where = f"the storage has no checkpoint of step {outcome.step}"
    known = f", its newest is that of step {stored}" if stored else ""
    on_nodes = max((event["step"] for event in saves_on_line(events, Tier.LOCAL)), default=0)
    local = f"; {cfg.ckpt.tiers.local} holds one of step {on_nodes}" if on_nodes else ""
    again = ". The same command trains again what no checkpoint holds"
    if _awaits_storage(cfg, run_dir, events, outcome.step):
        again = ". The same command brings it there"
    return f"Warning: {where}{known}{local}{again}."


def _tell_restart(
    cfg: DictConfig, run_dir: RunDirectory, events: Sequence[Mapping[str, Any]]
) -> str:
    """From where the same command goes on, as far as the places of the checkpoints can be seen."""
    from hetero_fw.app.places import checkpoint_root, within  # takes torch

    on_line = {event["step"] for tier in Tier for event in saves_on_line(events, tier)}
    left = {event["step"] for tier in Tier for event in committed_saves(events, tier)} - on_line
    saved = max(on_line, default=0)
    was = f"Step {saved} was committed, but" if saved else "No checkpoint was committed, and"
    try:
        root = checkpoint_root(cfg, run_dir)
        steps = within(_LOOK_TIMEOUT_S, lambda: _steps_there(cfg, run_dir, root))
    except (OSError, CheckpointError, ConfigError) as error:
        return f"{was} what is kept now cannot be seen: {error}"
    rejected = rejected_steps(events) & steps
    step = max(steps - left - rejected, default=0)
    if not step:
        if rejected:
            told = ", ".join(map(str, sorted(rejected)))
            return (
                f"Nothing is there that a restart could go on from: of the checkpoints in {root} "
                f"all were rejected (steps {told}; events.jsonl says why)."
            )
        why = f"{was} no checkpoint is left in {root}" if saved else was.removesuffix(", and")
        return f"{why}: the same command begins at step 0."
    gone = f"Step {saved} was committed, but is not there any more. " if step < saved else ""
    return (
        f"{gone}The newest committed checkpoint is that of step {step}; a restart goes on from it."
    )


def _steps_there(cfg: DictConfig, run_dir: RunDirectory, root: StoragePath) -> set[int]:
    """Steps of the checkpoints that are published; their bytes are not looked at.

    Raises:
        OSError: the directory cannot be read, such as a link to what is not there.
        CheckpointError: a remote storage refuses or does not answer.
    """
    from hetero_fw.checkpoint import is_object_store, published_paths

    if is_object_store(root):
        names = [path.name for path in published_paths(root, cfg.ckpt.prefix)]
    else:
        if os.path.lexists(root):
            list(root.iterdir())  # which, unlike a search, says why it fails
        names = list(published_names(root, cfg.ckpt.prefix))
    local = local_directory(cfg, run_dir.name)
    on_nodes = _steps_on_nodes(cfg, local) if local is not None else set()
    return {*steps_of(names), *on_nodes}
