"""What is kept of a run when it ends, for whoever reads its last lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from hetero_fw.monitoring import EventName, RunDirectory, Status, read_events

if TYPE_CHECKING:
    from hetero_fw.recovery import RunOutcome


def tell_what_is_kept(cfg: DictConfig, run_dir: RunDirectory, outcome: RunOutcome) -> str:
    """What is kept of the run, where that is not what its end leads to expect."""
    newest = {"local": 0, "storage": 0}
    for event in read_events(run_dir.events_path):
        if event["event"] == EventName.CHECKPOINT_COMMITTED:
            tier = event.get("tier", "storage")
            newest[tier] = max(newest[tier], event["step"])
    if outcome.status is not Status.DONE:
        step = max(newest.values())
        if not step:
            return "No checkpoint was committed: the same command begins at step 0."
        return f"The newest committed checkpoint is that of step {step}; a restart goes on from it."
    if cfg.ckpt.policy == "none" or newest["storage"] >= outcome.step:
        return ""
    where = f"the storage has no checkpoint of step {outcome.step}"
    known = f", its newest is that of step {newest['storage']}" if newest["storage"] else ""
    local = f"; {cfg.ckpt.tiers.local} holds one of step {newest['local']}"
    return f"Warning: {where}{known}{local if newest['local'] else ''}."
