"""Which checkpoints may go, once enough of the newer ones were read back."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetero_fw.checkpoint.catalog import CheckpointInfo, list_checkpoints
from hetero_fw.checkpoint.directories import retire
from hetero_fw.checkpoint.published import published_paths
from hetero_fw.checkpoint.read_back import NOTHING_READ, GoOn, Intact, always, read_newest
from hetero_fw.checkpoint.save_point import OnPoint, pass_by
from hetero_fw.checkpoint.storage import StoragePath
from hetero_fw.policies import (
    MIN_KEPT,
    CommittedCheckpoint,
    RetentionDecision,
    RetentionRule,
    decide_retention,
)

# What of all that there is may go, by a rule.
Decide = Callable[[Collection[CommittedCheckpoint], RetentionRule], RetentionDecision]


@dataclass(frozen=True, kw_only=True)
class PruneReport:
    """What `prune` deleted, what it knows to be intact, and why it stopped there.

    Attributes:
        intact: for the next call.
        rule: as `RetentionDecision` has it.
        is_complete: all was read that may change the decision.
    """

    deleted: tuple[StoragePath, ...] = ()
    intact: Intact = NOTHING_READ
    reason: str
    rule: RetentionRule | None = None
    is_complete: bool = True


def prune(
    root: Path,
    prefix: str,
    rule: RetentionRule,
    *,
    into: Path,
    intact: Intact = NOTHING_READ,
    go_on: GoOn = always,
    on_point: OnPoint = pass_by,
    decide: Decide = decide_retention,
) -> PruneReport:
    """Delete what `policies.decide_retention` gives up in a local directory. Called by one rank.

    Args:
        root: directory of the checkpoints.
        prefix: first part of their names.
        rule: what to keep.
        into: where a checkpoint is moved before it is deleted; a directory beside the
            checkpoints. If it is gone, nothing is deleted.
        intact: of the report of an earlier call; it is not read again.
        go_on: as `read_newest` takes it.
        on_point: called at every point that a deletion passes.
        decide: another policy, such as `policies.decide_room`.

    Raises:
        OSError: a checkpoint cannot be moved out of the way.
    """
    infos = list_checkpoints(root, prefix)
    if not exceeds(len(infos), rule, decide):
        report = PruneReport(intact=intact, reason=nothing_to_delete(len(infos), rule).reason)
    else:
        intact, is_complete = read_newest(infos, intact, go_on)
        if not is_enough(intact, is_complete):
            return unfinished(intact)
        report = retire_by_rule(
            infos, rule, into=into, intact=intact, on_point=on_point, decide=decide
        )
        report = replace(report, is_complete=is_complete)
    num_unreadable = len(list(published_paths(root, prefix))) + len(report.deleted) - len(infos)
    return replace(report, reason=report.reason + unreadable_note(num_unreadable))


def exceeds(num_found: int, rule: RetentionRule, decide: Decide) -> bool:
    """Whether any may go at all; if not, nothing needs to be read."""
    return num_found > (rule.keep_latest_k if decide is decide_retention else MIN_KEPT)


def nothing_to_delete(num_found: int, rule: RetentionRule) -> RetentionDecision:
    """What to say of as many as are kept in any case."""
    reason = f"keep_latest_k={rule.keep_latest_k}: nothing to delete, there are {num_found}"
    return RetentionDecision(delete_steps=(), reason=reason)


def is_enough(intact: Intact, is_complete: bool) -> bool:
    """Whether older ones may go already: what retention protects is known, if not the newest."""
    return is_complete or len(intact.steps) >= MIN_KEPT


def unfinished(intact: Intact) -> PruneReport:
    """What to say as long as not all is read that a decision needs."""
    return PruneReport(intact=intact, reason="not all is read yet", is_complete=False)


def unreadable_note(num_unreadable: int) -> str:
    """What retention says about checkpoints that it cannot judge."""
    return f"; {num_unreadable} more without a readable manifest stay" if num_unreadable else ""


def retire_by_rule(
    infos: Sequence[CheckpointInfo],
    rule: RetentionRule,
    *,
    into: Path,
    intact: Intact,
    on_point: OnPoint = pass_by,
    decide: Decide = decide_retention,
) -> PruneReport:
    """Delete those of `infos`, in one local directory, that the rule gives up; as `prune`."""
    decision = decide([retention_facts(info, intact, rule) for info in infos], rule)
    paths = {info.step: info.path for info in infos}
    deleted = tuple(paths[step] for step in decision.delete_steps)
    for path in deleted:
        assert isinstance(path, Path), path
        retire(path, into=into, token=secrets.token_hex(4), on_point=on_point)
    return PruneReport(
        deleted=deleted,
        intact=intact.but(decision.delete_steps),
        reason=decision.reason,
        rule=decision.rule,
    )


def retention_facts(
    info: CheckpointInfo, intact: Intact, rule: RetentionRule
) -> CommittedCheckpoint:
    """What retention needs to know of a checkpoint."""
    has_metric = info.metric is not None and info.metric.name == rule.monitor
    return CommittedCheckpoint(
        step=info.step,
        attempt=info.attempt,
        is_verified=intact.holds(info),
        is_finite=info.is_sane,
        metric=info.metric.value if info.metric is not None and has_metric else None,
    )
