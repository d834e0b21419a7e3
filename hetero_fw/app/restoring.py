"""Find the checkpoint that an attempt continues from, and watch what comes of it."""

from __future__ import annotations

from collections.abc import Iterator

from hetero_fw.app.context import RankContext
from hetero_fw.app.node_tier import is_leader, node_directory
from hetero_fw.app.places import build_place, checkpoint_root
from hetero_fw.callbacks import RestoreWatch
from hetero_fw.checkpoint import (
    PATIENCE_S,
    FoundCheckpoint,
    Incident,
    NewerFormatError,
    Quarantine,
    Ranks,
    Rejection,
    StoragePath,
    TierRoot,
    claim_attempt,
    find_candidates,
    is_object_store,
    published_paths,
    read_quarantine,
    record_incident,
)
from hetero_fw.errors import CheckpointError, ConfigError
from hetero_fw.monitoring import EventName, attempt_starts, read_events
from hetero_fw.parallel import StepSource
from hetero_fw.policies import IntervalPolicy, Tier, find_departure


def claim_and_search(context: RankContext) -> Iterator[FoundCheckpoint]:
    """The checkpoints that the attempt may continue from, for all ranks together, best first.

    Raises:
        CheckpointError: a later attempt has begun; also later, if storage does not answer.
    """
    ranks = Ranks(context.group)
    ranks.succeed_together(lambda: _claim(context))
    problems = [problem for problem in ranks.gather(_claim_node(context)) if problem]
    if problems and context.rank == 0:
        print(
            f"this attempt saves to no node directory: {problems[0]}; the storage gets every save",
            flush=True,
        )
    roots, patience_s = checkpoint_roots(context), _patience_s(context)
    quarantine = ranks.succeed_together(lambda: _quarantine(context, roots[-1].path, patience_s))
    starts = attempt_starts(read_events(context.run_dir.events_path)) if context.rank == 0 else ()
    return find_candidates(
        ranks,
        roots,
        context.cfg.ckpt.prefix,
        refuse=lambda manifest: quarantine.reason(manifest.step, manifest.attempt),
        depart=lambda manifest: find_departure(manifest.step, manifest.attempt, starts),
        on_rejected=lambda rejection: _tell_rejected(context, rejection),
        patience_s=patience_s,
    )


def next_checkpoint(
    context: RankContext, candidates: Iterator[FoundCheckpoint]
) -> FoundCheckpoint | None:
    """What all ranks try to continue from now; nothing is built before that.

    Returns:
        None for a fresh start.

    Raises:
        ConfigError: `resume=must` and there is nothing to continue from; or the newest checkpoint
            is of a newer release.
        CheckpointError: storage does not answer.
    """
    try:
        found = next(candidates, None)
    except NewerFormatError as error:
        raise ConfigError(
            f"resume={context.cfg.resume}: {error}. Continue with that release, or choose another "
            "run_name to start fresh."
        ) from error
    if context.rank == 0 and context.attempt > 0:
        print(f"continuing from {_name(found.path) if found else 'step 0'}", flush=True)
    if found is None:
        _check_fresh_start(context)
    return found


def checkpoint_roots(context: RankContext) -> tuple[TierRoot, ...]:
    """Where this rank may find checkpoints, nearest first; the last one is common to all ranks."""
    storage = TierRoot(tier=Tier.STORAGE, path=checkpoint_root(context.cfg, context.run_dir))
    local = node_directory(context)
    if local is None:
        return (storage,)
    node = context.plan.ranks[context.rank].node
    return (TierRoot(tier=Tier.LOCAL, path=local, node=node), storage)


def _quarantine(context: RankContext, root: StoragePath, patience_s: float) -> Quarantine:
    """What rank 0 needs to know; the others ask nothing of the storage."""
    if context.rank != 0:
        return Quarantine()
    return read_quarantine(root, patience_s)


def _claim(context: RankContext) -> None:
    """First of all: no earlier attempt changes anything from here on.

    Also puts back a replacement that was cut short in the middle.
    """
    saves = context.cfg.ckpt.policy != IntervalPolicy.NONE
    if context.rank == 0 and (saves or _has_checkpoints(context)):
        place = build_place(context.cfg, context.run_dir, context.attempt)
        place.claim(_patience_s(context))


def _claim_node(context: RankContext) -> str:
    """The same for this node's directory; what is wrong with it, for the storage can do without."""
    local = node_directory(context)
    saves = context.cfg.ckpt.policy != IntervalPolicy.NONE
    try:
        if local is not None and is_leader(context) and (saves or local.is_dir()):
            claim_attempt(local, context.attempt)
    except (OSError, CheckpointError) as error:
        return str(error)
    return ""


def _has_checkpoints(context: RankContext) -> bool:
    root = checkpoint_root(context.cfg, context.run_dir)
    if not is_object_store(root):
        return root.is_dir()
    return any(True for _ in published_paths(root, context.cfg.ckpt.prefix))


def _patience_s(context: RankContext) -> float:
    """How long to try storage again; the ranks that wait for the one that tries give up later."""
    return min(PATIENCE_S, float(context.cfg.recovery.process_group_timeout_s) / 4)


def _check_fresh_start(context: RankContext) -> None:
    """Refuse to start over what `resume=must` wants continued; the supervisor saw checkpoints."""
    if context.cfg.resume == "must":
        raise ConfigError(
            f"resume=must, but no checkpoint in {checkpoint_roots(context)[-1].path} could be "
            "verified; events.jsonl has a checkpoint_rejected for each. Use resume=auto to start "
            "fresh."
        )


def _tell_rejected(context: RankContext, rejection: Rejection) -> None:
    if context.rank != 0:
        return
    context.events.write(
        EventName.CHECKPOINT_REJECTED,
        step=rejection.step,
        path=rejection.path,
        reason=rejection.reason,
    )
    print(f"checkpoint rejected: {rejection.reason}", flush=True)


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def build_restore_watch(
    context: RankContext, source: StepSource, found: FoundCheckpoint | None
) -> list[RestoreWatch]:
    """What watches the steps after a restore; nothing for a fresh start."""
    if found is None:
        return []
    root, patience_s = checkpoint_roots(context)[-1].path, _patience_s(context)
    step, saved_by = found.step, found.manifest.attempt
    quarantine = found.ranks.succeed_together(lambda: _quarantine(context, root, patience_s))
    earlier = quarantine.attempts(step, saved_by)

    def record(diverged_step: int) -> None:
        incident = Incident(
            step=step, saved_by=saved_by, attempt=context.attempt, diverged_step=diverged_step
        )
        record_incident(root, incident, patience_s)

    return [
        RestoreWatch(
            source=source,
            exchange=context.exchange,
            rank=context.rank,
            restored_step=step,
            attempt=context.attempt,
            earlier_attempts=found.ranks.broadcast(earlier, source=0),
            record=record,
        )
    ]
