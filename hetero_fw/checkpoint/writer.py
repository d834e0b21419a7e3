"""The background half of a save: write, then decide or learn what became of it."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from hetero_fw.checkpoint.commit import build_manifest
from hetero_fw.checkpoint.directories import parse_name
from hetero_fw.checkpoint.executor import Executor
from hetero_fw.checkpoint.manifest import Manifest
from hetero_fw.checkpoint.node_place import NodePlace, TakeCopies
from hetero_fw.checkpoint.node_roles import (
    MANIFEST_TOPIC,
    NodeRoles,
    address_topic,
    published_topic,
)
from hetero_fw.checkpoint.place import Place
from hetero_fw.checkpoint.pruning import PruneReport
from hetero_fw.checkpoint.remedy import Remedy
from hetero_fw.checkpoint.replicas import ReplicaAddress
from hetero_fw.checkpoint.retirement import Retirement
from hetero_fw.checkpoint.save_handle import SaveOutcome
from hetero_fw.checkpoint.save_job import SafeStep, SaveJob
from hetero_fw.checkpoint.save_tasks import FencedBy, Publish, WritePart
from hetero_fw.checkpoint.storage import StorageHangs, StoragePath
from hetero_fw.checkpoint.storage_error import PLACE_IS_GONE
from hetero_fw.checkpoint.unsettled import UnsettledSaves
from hetero_fw.checkpoint.verdict import ShardReport, Verdict, VerdictBoard, again
from hetero_fw.errors import CheckpointError
from hetero_fw.monitoring import EventName
from hetero_fw.policies import RetentionRule, Tier

# A rank's part has the given time. Its report, publishing and the verdict come one after the other,
# so whoever waits for one of them gives it that much more: what failed first is then the reason.
COLLECT_GRACE = 1.1
PUBLISH_GRACE = 1.2
VERDICT_GRACE = 1.3


def clear_up_s(timeout_s: float) -> float:
    """How long clearing up after a save may take that had `timeout_s`; what is left then stays."""
    return min(5.0, timeout_s / 5)


OnEvent = Callable[[str, int | None, dict[str, Any]], None]

logger = logging.getLogger(__name__)


class TierWriter:
    """Brings save jobs of one rank to one tier of storage.

    Args:
        tier: name of the tier, for events.
        board: where the ranks tell each other how it went.
        executor: does whatever touches the storage, on the staged bytes.
        timeout_s: longest time from the end of staging until every rank's part is on storage.
        retention: if given, rank 0 prunes by it after each commit.
        safe: kept up to date by rank 0 and the others alike.
        roles: None: the storage is one that all ranks see, and rank 0 publishes.
    """

    def __init__(  # noqa: PLR0913  # what the saver knows and a tier needs
        self,
        *,
        tier: Tier,
        rank: int,
        prefix: str,
        place: Place,
        board: VerdictBoard,
        executor: Executor,
        on_event: OnEvent,
        timeout_s: float,
        retention: RetentionRule | None,
        safe: SafeStep,
        roles: NodeRoles | None = None,
    ) -> None:
        self.tier = tier
        self.executor = executor
        self._rank = rank
        self._place = place
        self._board = board
        self._on_event = on_event
        self._timeout_s = timeout_s
        self._safe = safe
        self._roles = roles
        self._unsettled = UnsettledSaves(place=place, board=board, executor=executor)
        self._retirement = Retirement(
            place=place,
            prefix=prefix,
            executor=executor,
            rule=retention,
            timeout_s=timeout_s,
            counts_unread=roles is not None,
            on_report=self._tell_deleted,
        )
        self._remedy = Remedy(
            place=place,
            executor=executor,
            retirement=self._retirement,
            unsettled=self._unsettled,
            timeout_s=timeout_s,
            clear_up_s=clear_up_s(timeout_s),
        )

    def emit(self, event: EventName, step: int | None, **fields: Any) -> None:
        """Report an event; a log that cannot be written does not lose a checkpoint."""
        try:
            self._on_event(event, step, fields)
        except Exception:
            logger.exception("%s of step %s was not logged", event, step)

    def cancel(self) -> None:
        """Have every save in flight, and every later one, fail at once; retire nothing more."""
        self._board.cancel()
        self._retirement.stop()

    def run(
        self,
        job: SaveJob,
        *,
        is_foreground: bool,
        on_verdict: Callable[[bool], None] = lambda is_committed: None,
    ) -> SaveOutcome:
        """Bring a staged job to its end and set its handle, whatever happens.

        Args:
            on_verdict: told whether it is committed, before older checkpoints are read back.
        """
        verdict = Verdict(is_committed=False, reason="the writer ended early")
        persist_s = 0.0
        try:
            verdict = self._persist(job)
            on_verdict(verdict.is_committed)
            persist_s = time.monotonic() - job.staged_at_s
            if is_foreground:
                verdict = replace(verdict, stall_s=job.stall_s + persist_s)
            if verdict.is_committed:
                self._safe.step = job.spec.step
            if self._rank == 0:
                self._tell(job, verdict, persist_s)
        finally:
            has_stall = verdict.is_committed or is_foreground
            location: StoragePath | None = self._place.location(job.spec)
            outcome = SaveOutcome(
                step=job.spec.step,
                tier=self.tier,
                ok=verdict.is_committed,
                reason=verdict.reason,
                stall_s=verdict.stall_s if has_stall else job.stall_s,
                persist_s=persist_s,
                setup_s=job.setup_s,
                postponed_s=job.postponed_s,
                size_bytes=verdict.size_bytes,
                path=location if verdict.is_committed else None,
            )
            job.handle.decide(outcome)
        try:
            if self._rank == 0 and verdict.is_committed:
                self._retire(job)
        finally:
            job.handle.end()
        return outcome

    def _persist(self, job: SaveJob) -> Verdict:
        try:
            verdict = self._try(job, job.spec.token)
            if verdict.is_again:
                verdict = self._try(job, again(job.spec.token))
        except Exception as error:  # noqa: BLE001  # thread boundary; training goes on
            verdict = Verdict(is_committed=False, reason=f"rank {self._rank}: {error}")
            if self._rank != 0:  # rank 0 does not know
                may_exist = job.written is not None
                unknown = "; it may be published all the same" if may_exist else ""
                self.tell_failure(job.spec.step, verdict.reason + unknown)
                if may_exist:
                    self._unsettled.add(job)
                    return verdict
        if not verdict.is_committed:
            self._clear_up(job)
        return verdict

    def _try(self, job: SaveJob, name: str) -> Verdict:
        """One round of writing and judging; the board has it under `name`."""
        self._board.post(name, self._write(job))
        return self._decide(job, name) if self._rank == 0 else self._learn(job, name)

    def _write(self, job: SaveJob) -> ShardReport:
        deadline_s = job.staged_at_s + self._timeout_s

        def on_progress(num_bytes: int) -> None:
            job.num_bytes_done = num_bytes

        try:
            if job.error is not None:
                raise CheckpointError(job.error)
            if job.storage_hangs:
                raise StorageHangs
            if job.written is not None:  # by an earlier try
                return ShardReport(rank=self._rank, stall_s=job.stall_s, shard=job.written)
            task = WritePart(
                place=self._place_of(job, deadline_s),
                spec=job.spec,
                layout=job.layout.own,
                source=job.source,
                expected=job.expected,
                may_be_infinite=job.may_be_infinite,
                time_left_s=deadline_s - time.monotonic(),
            )
            write = partial(self.executor.run, task, deadline_s=deadline_s, on_progress=on_progress)
            job.written = self._unsettled.write(write, clear_up_s(self._timeout_s))
        except Exception as error:  # noqa: BLE001  # the error becomes every rank's verdict
            job.storage_hangs = isinstance(error, StorageHangs)
            return ShardReport(rank=self._rank, error=str(error) or repr(error))
        return ShardReport(rank=self._rank, stall_s=job.stall_s, shard=job.written)

    def _place_of(self, job: SaveJob, deadline_s: float) -> Place:
        """Where this rank's part goes: for node directories with the addresses of the copies."""
        if self._roles is None:
            return self._place
        assert isinstance(self._place, NodePlace)
        own = self.executor.run(
            TakeCopies(place=self._place, host=self._roles.host), deadline_s=deadline_s
        )
        token = job.spec.token
        self._board.tell(token, address_topic(self._rank), json.dumps(asdict(own)))
        peers = [
            ReplicaAddress(**json.loads(self._board.hear(token, address_topic(rank), deadline_s)))
            for rank in self._roles.receivers
        ]
        return self._place.sending_to(tuple(peers))

    def _learn(self, job: SaveJob, name: str) -> Verdict:
        """Other ranks: publish on this node, if that falls to this rank, and await the verdict."""
        deadline_s = job.staged_at_s + VERDICT_GRACE * self._timeout_s
        is_leader = self._roles is not None and self._rank in self._roles.leaders
        if is_leader:
            self._publish_here(job, deadline_s)
        verdict = self._board.await_verdict(name, deadline_s)
        if is_leader and verdict.is_committed:
            self._retire(job)
        return verdict

    def _publish_here(self, job: SaveJob, deadline_s: float) -> None:
        """Publish this node's part of the checkpoint and tell rank 0."""
        token = job.spec.token
        try:
            manifest = Manifest.from_json(self._board.hear(token, MANIFEST_TOPIC, deadline_s))
        except CheckpointError:
            return  # the save has failed; the verdict says why
        problem = ""
        try:
            self._run_publish(job, manifest, deadline_s)
        except Exception as error:  # noqa: BLE001  # rank 0 waits for an answer
            job.storage_hangs |= isinstance(error, StorageHangs)
            problem = str(error) or repr(error)
        self._board.tell(token, published_topic(self._rank), problem)

    def _publish(self, job: SaveJob, manifest: Manifest) -> None:
        """Rank 0: make the checkpoint exist in every place of the tier."""
        deadline_s = job.staged_at_s + PUBLISH_GRACE * self._timeout_s
        others = [r for r in self._roles.leaders if r != self._rank] if self._roles else []
        if others:
            self._board.tell(job.spec.token, MANIFEST_TOPIC, manifest.to_json())
        self._run_publish(job, manifest, deadline_s)
        for rank in others:
            problem = self._board.hear(job.spec.token, published_topic(rank), deadline_s)
            if problem:
                raise CheckpointError(f"rank {rank}: {problem}")

    def _run_publish(self, job: SaveJob, manifest: Manifest, deadline_s: float) -> None:
        job.manifest = manifest
        task = Publish(
            place=self._place,
            spec=job.spec,
            manifest=manifest,
            time_left_s=deadline_s - time.monotonic(),
        )
        self.executor.run(task, deadline_s=deadline_s)

    def _decide(self, job: SaveJob, name: str) -> Verdict:
        """Rank 0: publish if every rank has written its shard, and tell everybody."""
        try:
            deadline_s = job.staged_at_s + COLLECT_GRACE * self._timeout_s
            reports = self._board.collect(name, deadline_s)
            manifest = build_manifest(job.spec, job.layout.shards, reports)
            self._publish(job, manifest)
            verdict = Verdict(
                is_committed=True,
                reason=job.spec.reason,
                stall_s=max(report.stall_s for report in reports),
                size_bytes=manifest.size_bytes,
            )
        except Exception as error:  # noqa: BLE001  # the other ranks wait for an answer
            job.storage_hangs |= isinstance(error, StorageHangs)
            reason = self._reason(job, error)
            # Node directories have too few checkpoints for one to go.
            may_again = self._roles is None and name == job.spec.token
            verdict = Verdict(
                is_committed=False,
                reason=reason,
                is_again=may_again and self._remedy.lets_try_again(job, reason),
            )
        try:
            self._board.announce(name, verdict, sequence=job.sequence)
        except Exception as error:  # noqa: BLE001
            # What is published is published, whether or not the others can be told.
            logger.warning("verdict on step %d was not announced: %s", job.spec.step, error)
        return verdict

    def _tell(self, job: SaveJob, verdict: Verdict, persist_s: float) -> None:
        """Rank 0: log what became of a save. After a failure the next one shall have room first."""
        if not verdict.is_committed:
            done = self._remedy.for_the_next(job, verdict.reason)
            self.tell_failure(job.spec.step, verdict.reason + done)
            return
        self.emit(
            EventName.CHECKPOINT_COMMITTED,
            job.spec.step,
            tier=self.tier,
            path=str(self._place.location(job.spec)),
            bytes=verdict.size_bytes,
            stall_s=verdict.stall_s,
            persist_s=persist_s,
            reason=verdict.reason,
        )

    def tell_failure(self, step: int, reason: str) -> None:
        """Log a save that failed, and what is safe all the same."""
        self.emit(
            EventName.CHECKPOINT_FAILED,
            step,
            tier=self.tier,
            reason=reason,
            safe_step=self._safe.step,
            message=f"checkpoint of step {step} failed: {reason}; "
            + self._safe.tell(is_place_gone=PLACE_IS_GONE in reason),
        )

    def _clear_up(self, job: SaveJob) -> None:
        """Make a save that failed be gone, now or once the storage is well."""
        if job.storage_hangs:
            self._unsettled.add(job)
            return
        try:
            self._unsettled.clear_up(job, time.monotonic() + clear_up_s(self._timeout_s))
        except Exception:  # noqa: BLE001  # the verdict stands
            self._unsettled.add(job)

    def _retire(self, job: SaveJob) -> None:
        """Delete what a new checkpoint replaces."""
        if not job.retires:
            return
        try:
            self._retirement.after_save(job.spec.step, job.spec.on_point)
        except Exception as error:  # noqa: BLE001  # the checkpoint is there all the same
            if self._retirement.is_stopped:
                return
            logger.warning(
                "old checkpoints were not removed: %s; %s",
                self._reason(job, error),
                self._safe.tell(),
            )

    def _tell_deleted(self, report: PruneReport) -> None:
        """Log what is no more; rank 0 for all nodes, which delete the same."""
        for path in report.deleted if self._rank == 0 else ():
            name = parse_name(path.name)
            self.emit(
                EventName.CHECKPOINT_DELETED,
                name.step if name is not None else None,
                tier=self.tier,
                path=str(path),
                reason=report.reason,
            )

    def _reason(self, job: SaveJob, error: Exception) -> str:
        """Why it failed; behind any error of a stale attempt is that it is one."""
        later = None
        if not job.storage_hangs:
            with contextlib.suppress(Exception):
                later = self._fenced_by()
        return str(error) or repr(error) if later is None else f"fenced by attempt {later}"

    def _fenced_by(self) -> int | None:
        return self.executor.run(
            FencedBy(place=self._place), deadline_s=time.monotonic() + clear_up_s(self._timeout_s)
        )
