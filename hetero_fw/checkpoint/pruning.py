"""Which checkpoints may go, once enough of the newer ones were read back."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetero_fw.checkpoint.catalog import CheckpointInfo, list_checkpoints, verify_file
from hetero_fw.checkpoint.directories import retire
from hetero_fw.checkpoint.manifest import read_manifest
from hetero_fw.checkpoint.published import published_paths
from hetero_fw.checkpoint.save_point import OnPoint, pass_by
from hetero_fw.checkpoint.storage import StoragePath
from hetero_fw.errors import CheckpointError
from hetero_fw.policies import (
    MIN_KEPT,
    CommittedCheckpoint,
    RetentionDecision,
    RetentionRule,
    decide_retention,
)

# Called while bytes are read; whether there is time to read more.
GoOn = Callable[[], bool]

# What of all that there is may go, by a rule.
Decide = Callable[[Collection[CommittedCheckpoint], RetentionRule], RetentionDecision]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How far checkpoints were read back in earlier calls, and how long this one may go on.

    Attributes:
        files: of `PruneReport.verified_files`.
        go_on: called after every piece; once it returns False, reading ends with the file.
    """

    files: frozenset[str] = frozenset()
    go_on: GoOn = lambda: True


READ_ALL = Reading()


@dataclass(frozen=True, kw_only=True)
class PruneReport:
    """What `prune` deleted, which steps it knows to be intact, and why it stopped there.

    Attributes:
        verified_files: of checkpoints of which not all was read yet; for the next call.
        rule: as `RetentionDecision` has it.
        is_complete: all was read that the decision needs; otherwise nothing is deleted.
    """

    deleted: tuple[StoragePath, ...]
    verified_steps: frozenset[int]
    reason: str
    verified_files: frozenset[str] = frozenset()
    rule: RetentionRule | None = None
    is_complete: bool = True


def prune(
    root: Path,
    prefix: str,
    rule: RetentionRule,
    *,
    into: Path,
    verified_steps: Collection[int] = (),
    reading: Reading = READ_ALL,
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
        verified_steps: steps that the caller has verified before; they are not read again.
        reading: of those that are not verified yet.
        on_point: called at every point that a deletion passes.
        decide: another policy, such as `policies.decide_room`.

    Raises:
        OSError: a checkpoint cannot be moved out of the way.
    """
    infos = list_checkpoints(root, prefix)
    verified = frozenset(verified_steps) & {info.step for info in infos}
    reader = _Reader(reading)
    num_kept = rule.keep_latest_k if decide is decide_retention else MIN_KEPT
    if len(infos) <= num_kept:  # nothing can go and nothing needs to be read
        reason = f"keep_latest_k={rule.keep_latest_k}: nothing to delete, there are {len(infos)}"
        report = PruneReport(deleted=(), verified_steps=verified, reason=reason)
    else:
        verified, is_complete = reader.verify_newest(infos, verified)
        if not is_complete:
            return PruneReport(
                deleted=(),
                verified_steps=verified,
                verified_files=frozenset(reader.files),
                reason="not all is read yet",
                is_complete=False,
            )
        report = retire_by_rule(
            infos, rule, into=into, verified_steps=verified, on_point=on_point, decide=decide
        )
    num_unreadable = len(list(published_paths(root, prefix))) + len(report.deleted) - len(infos)
    return replace(report, reason=report.reason + unreadable_note(num_unreadable))


def unreadable_note(num_unreadable: int) -> str:
    """What retention says about checkpoints that it cannot judge."""
    return f"; {num_unreadable} more without a readable manifest stay" if num_unreadable else ""


def retire_by_rule(
    infos: Sequence[CheckpointInfo],
    rule: RetentionRule,
    *,
    into: Path,
    verified_steps: Collection[int],
    on_point: OnPoint = pass_by,
    decide: Decide = decide_retention,
) -> PruneReport:
    """Delete those of `infos`, in one local directory, that the rule gives up; as `prune`."""
    verified = frozenset(verified_steps)
    decision = decide([retention_facts(info, verified, rule) for info in infos], rule)
    paths = {info.step: info.path for info in infos}
    deleted = tuple(paths[step] for step in decision.delete_steps)
    for path in deleted:
        assert isinstance(path, Path), path
        retire(path, into=into, token=secrets.token_hex(4), on_point=on_point)
    return PruneReport(
        deleted=deleted,
        verified_steps=verified - frozenset(decision.delete_steps),
        reason=decision.reason,
        rule=decision.rule,
    )


def retention_facts(
    info: CheckpointInfo, verified_steps: Collection[int], rule: RetentionRule
) -> CommittedCheckpoint:
    """What retention needs to know of a checkpoint."""
    has_metric = info.metric is not None and info.metric.name == rule.monitor
    return CommittedCheckpoint(
        step=info.step,
        attempt=info.attempt,
        is_verified=info.step in verified_steps,
        is_finite=info.is_sane,
        metric=info.metric.value if info.metric is not None and has_metric else None,
    )


class _Reader:
    """Reads checkpoints back, file by file; at least one in each call of `prune`.

    Attributes:
        files: that are as they were written, of checkpoints of which not all was read yet.
    """

    def __init__(self, reading: Reading) -> None:
        self.files = set(reading.files)
        self._go_on = reading.go_on
        self._num_read = 0

    def verify_newest(
        self, infos: Collection[CheckpointInfo], verified: frozenset[int]
    ) -> tuple[frozenset[int], bool]:
        """Verify from the newest down until enough are intact; whether there was time for it."""
        begun = {key.partition("/")[0] for key in self.files}
        intact: set[int] = set()
        # As retention orders them, but first what was begun: it would never end where a checkpoint
        # takes longer to read than the next takes to come.
        for info in sorted(
            infos, key=lambda info: (info.path.name in begun, info.attempt, info.step), reverse=True
        ):
            if len(intact) == MIN_KEPT:  # as many as retention protects
                break
            if not info.is_sane:
                continue
            if info.step not in verified:
                try:
                    if not self._finish(info):
                        return verified | intact, False
                except CheckpointError:
                    continue
            intact.add(info.step)
        return frozenset(intact), True

    def _finish(self, info: CheckpointInfo) -> bool:
        """Verify the files that are not known yet; False if there was no time for all.

        Raises:
            CheckpointError: one is not as it was written.
        """
        manifest = read_manifest(info.path)
        files = {f"{info.path.name}/{file.name} {file.digest}": file for file in manifest.files}
        for key, file in files.items():
            if key in self.files:
                continue
            if self._num_read and not self._go_on():
                return False
            self._num_read += 1
            verify_file(info.path, file, manifest.hash, self._go_on)
            self.files.add(key)
        self.files.difference_update(files)
        return True
