"""The background half of a save: write, then decide or learn what became of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetero_fw.checkpoint.catalog import prune
from hetero_fw.checkpoint.commit import CommitSpec, commit, discard, write_own_shard
from hetero_fw.checkpoint.fencing import fenced_by
from hetero_fw.checkpoint.save_handle import SaveHandle, SaveOutcome
from hetero_fw.checkpoint.shard_layout import SaveLayout
from hetero_fw.checkpoint.staging import StagingBuffer
from hetero_fw.checkpoint.verdict import ShardReport, Verdict, VerdictBoard
from hetero_fw.errors import CheckpointError
from hetero_fw.monitoring import EventName
from hetero_fw.policies import RetentionRule

# Other ranks give rank 0 this much more time, so that its verdict arrives before they give up.
VERDICT_GRACE = 1.25

OnEvent = Callable[[str, int, dict[str, Any]], None]

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class SaveJob:
    """One save on its way from `save` to its outcome.

    Attributes:
        sequence: number of the `save` call it comes from.
        started_at_s: when `save` was called, by the monotonic clock; `staged_at_s` when the
            tensors were free again.
        error: why this rank cannot take part, None if it can.
    """

    handle: SaveHandle
    sequence: int
    spec: CommitSpec
    layout: SaveLayout
    may_be_infinite: frozenset[str]
    started_at_s: float
    staged_at_s: float = 0.0
    setup_s: float = 0.0
    postponed_s: float = 0.0
    error: str | None = None

    @property
    def stall_s(self) -> float:
        """How long this rank's training stood still, as far as it recurs with every save."""
        return self.staged_at_s - self.started_at_s - self.setup_s - self.postponed_s


class SaveWriter:
    """Runs save jobs of one rank, each in whatever thread calls `run`.

    Args:
        board: where the ranks tell each other how it went.
        staging: holds the bytes of the job that is run.
        timeout_s: longest time from the end of staging to the verdict.
        retention: if given, rank 0 prunes by it after each commit.
    """

    def __init__(
        self,
        *,
        rank: int,
        prefix: str,
        board: VerdictBoard,
        staging: StagingBuffer,
        on_event: OnEvent,
        timeout_s: float,
        retention: RetentionRule | None,
    ) -> None:
        self._rank = rank
        self._prefix = prefix
        self._board = board
        self._staging = staging
        self._on_event = on_event
        self._timeout_s = timeout_s
        self._retention = retention
        self._verified_steps: frozenset[int] = frozenset()

    def emit(self, event: EventName, step: int, **fields: Any) -> None:
        """Report an event; a log that cannot be written does not lose a checkpoint."""
        try:
            self._on_event(event, step, fields)
        except Exception:
            logger.exception("%s of step %d was not logged", event, step)

    def run(self, job: SaveJob, *, is_foreground: bool) -> None:
        """Bring the job to its end and set its handle, whatever happens."""
        verdict = Verdict(is_committed=False, reason="the writer ended early")
        persist_s = 0.0
        try:
            verdict = self._persist(job)
            persist_s = time.monotonic() - job.staged_at_s
            if self._rank == 0:
                self._conclude(job, verdict, persist_s)
        finally:
            stall_s = verdict.stall_s if verdict.is_committed else job.stall_s
            if is_foreground:
                stall_s = time.monotonic() - job.staged_at_s + job.stall_s
            job.handle.finish(
                SaveOutcome(
                    step=job.spec.step,
                    ok=verdict.is_committed,
                    reason=verdict.reason,
                    stall_s=stall_s,
                    persist_s=persist_s,
                    setup_s=job.setup_s,
                    postponed_s=job.postponed_s,
                    size_bytes=verdict.size_bytes,
                    path=job.spec.final if verdict.is_committed else None,
                )
            )

    def _persist(self, job: SaveJob) -> Verdict:
        try:
            self._board.post(job.spec.token, self._write(job))
            if self._rank == 0:
                verdict = self._decide(job)
            else:
                deadline_s = job.staged_at_s + VERDICT_GRACE * self._timeout_s
                verdict = self._board.await_verdict(job.spec.token, deadline_s)
        except Exception as error:  # noqa: BLE001  # thread boundary; training goes on
            verdict = Verdict(is_committed=False, reason=f"rank {self._rank}: {error}")
            if self._rank != 0:  # rank 0 does not know
                self.emit(EventName.CHECKPOINT_FAILED, job.spec.step, reason=verdict.reason)
        if not verdict.is_committed:
            discard(job.spec, job.layout.own)
        return verdict

    def _write(self, job: SaveJob) -> ShardReport:
        try:
            if job.error is not None:
                raise CheckpointError(job.error)
            culprit = self._staging.first_non_finite(job.may_be_infinite)
            if culprit is not None:
                raise CheckpointError(f"{culprit} is not finite")
            shard = write_own_shard(job.spec, self._staging.content, job.layout.own)
        except Exception as error:  # noqa: BLE001  # the error becomes every rank's verdict
            return ShardReport(rank=self._rank, error=str(error) or repr(error))
        return ShardReport(rank=self._rank, stall_s=job.stall_s, shard=shard)

    def _decide(self, job: SaveJob) -> Verdict:
        """Rank 0: publish if every rank has written its shard, and tell everybody."""
        try:
            reports = self._board.collect(job.spec.token, job.staged_at_s + self._timeout_s)
            manifest = commit(job.spec, job.layout, reports)
            verdict = Verdict(
                is_committed=True,
                reason=job.spec.reason,
                stall_s=max(report.stall_s for report in reports),
                size_bytes=manifest.size_bytes,
            )
        except Exception as error:  # noqa: BLE001  # the other ranks wait for an answer
            verdict = Verdict(is_committed=False, reason=_reason(job.spec, error))
        try:
            self._board.announce(job.spec.token, verdict, sequence=job.sequence)
        except CheckpointError as error:
            # What is published is published, whether or not the others can be told.
            logger.warning("verdict on step %d was not announced: %s", job.spec.step, error)
        return verdict

    def _conclude(self, job: SaveJob, verdict: Verdict, persist_s: float) -> None:
        """Rank 0: log the verdict; clear out what a new checkpoint replaces."""
        if not verdict.is_committed:
            self.emit(EventName.CHECKPOINT_FAILED, job.spec.step, reason=verdict.reason)
            return
        self.emit(
            EventName.CHECKPOINT_COMMITTED,
            job.spec.step,
            path=str(job.spec.final),
            bytes=verdict.size_bytes,
            stall_s=verdict.stall_s,
            persist_s=persist_s,
            reason=verdict.reason,
        )
        if self._retention is not None:
            self._prune(job.spec, self._retention)

    def _prune(self, spec: CommitSpec, rule: RetentionRule) -> None:
        try:
            report = prune(
                spec.final.parent,
                self._prefix,
                rule,
                into=spec.directories.retired,
                verified_steps=self._verified_steps - {spec.step},
                on_point=spec.on_point,
            )
        except (OSError, CheckpointError) as error:
            logger.warning("old checkpoints were not removed: %s", _reason(spec, error))
        else:
            self._verified_steps = report.verified_steps


def _reason(spec: CommitSpec, error: Exception) -> str:
    """Why it failed; behind any error of a stale attempt is that it is one."""
    later = fenced_by(spec.directories)
    return str(error) or repr(error) if later is None else f"fenced by attempt {later}"
