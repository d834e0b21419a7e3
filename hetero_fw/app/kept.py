"""What is kept of a run when it ends, for whoever reads its last lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from hetero_fw.app.storage_settings import local_directory, node_directories
from hetero_fw.monitoring import (
    RunDirectory,
    Status,
    read_events,
    read_status,
    saves_on_line,
)
from hetero_fw.policies import IntervalPolicy, Tier

if TYPE_CHECKING:
    from hetero_fw.recovery import RunOutcome


def finished_step(cfg: DictConfig, run_dir: RunDirectory) -> int | None:
    """The step a run has ended with that leaves nothing to do; None if something is left."""
    step = trained_step(cfg, run_dir)
    return None if step is None or awaits_storage(cfg, run_dir, step) else step


def trained_step(cfg: DictConfig, run_dir: RunDirectory) -> int | None:
    """The step a run has ended with that leaves nothing to train; None if something is left."""
    status = read_status(run_dir.status_path)
    if status is None or status.status is not Status.DONE:
        return None
    return status.step if status.step >= int(cfg.trainer.max_steps) else None


def awaits_storage(cfg: DictConfig, run_dir: RunDirectory, step: int) -> bool:
    """Whether the checkpoint of the last step is whole on the nodes, and not in the storage.

    Only as far as this host sees it: an attempt that did not find it would train again.
    """
    local = local_directory(cfg, run_dir.name)
    if cfg.ckpt.policy == IntervalPolicy.NONE or local is None or not node_directories(local):
        return False
    stored = saves_on_line(read_events(run_dir.events_path), Tier.STORAGE)
    if any(event["step"] == step for event in stored):
        return False
    # Takes torch: only where a run has left something on its nodes.
    from hetero_fw.checkpoint import examine_node_copies, find_node_copies

    return any(
        copies.step == step
        and copies.manifest is not None
        and not examine_node_copies(copies, reads_bytes=False).missing
        for copies in find_node_copies(local, cfg.ckpt.prefix)
    )


def tell_what_is_kept(cfg: DictConfig, run_dir: RunDirectory, outcome: RunOutcome) -> str:
    """What is kept of the run, where that is not what its end leads to expect."""
    events = read_events(run_dir.events_path)
    newest = {
        tier: max((event["step"] for event in saves_on_line(events, tier)), default=0)
        for tier in Tier
    }
    if outcome.status is not Status.DONE:
        step = max(newest.values())
        if not step:
            return "No checkpoint was committed: the same command begins at step 0."
        return f"The newest committed checkpoint is that of step {step}; a restart goes on from it."
    if cfg.ckpt.policy == IntervalPolicy.NONE or newest[Tier.STORAGE] >= outcome.step:
        return ""
    where = f"the storage has no checkpoint of step {outcome.step}"
    known = f", its newest is that of step {newest[Tier.STORAGE]}" if newest[Tier.STORAGE] else ""
    local = f"; {cfg.ckpt.tiers.local} holds one of step {newest[Tier.LOCAL]}"
    again = ". The same command brings it there"
    return (
        f"Warning: {where}{known}{local if newest[Tier.LOCAL] else ''}"
        f"{again if awaits_storage(cfg, run_dir, outcome.step) else ''}."
    )
