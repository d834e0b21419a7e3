"""Save checkpoints beside training: stage in the foreground or beside the next step, then write."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.distributed_c10d import ProcessGroup, Store

from hetero_fw.checkpoint.executor import Executor, ThreadExecutor
from hetero_fw.checkpoint.hashing import HashAlgorithm
from hetero_fw.checkpoint.in_flight import SavesInFlight
from hetero_fw.checkpoint.manifest import Metric
from hetero_fw.checkpoint.node_roles import NodeRoles, NodeTier
from hetero_fw.checkpoint.place import Place
from hetero_fw.checkpoint.route import Route, Target
from hetero_fw.checkpoint.save_handle import SaveHandle, SaveOutcome, SaveProgress
from hetero_fw.checkpoint.save_job import SafeStep, SaveJob
from hetero_fw.checkpoint.save_planner import SaveContent, SavePlanner
from hetero_fw.checkpoint.save_point import OnPoint, pass_by
from hetero_fw.checkpoint.stager import Rest, Stager
from hetero_fw.checkpoint.verdict import VerdictBoard
from hetero_fw.checkpoint.writer import (
    VERDICT_GRACE,
    OnEvent,
    TierWriter,
    clear_up_s,
)
from hetero_fw.checkpoint.writer_process import WriterProcess
from hetero_fw.monitoring import EventName
from hetero_fw.policies import RetentionRule, Tier

CLOSE_GRACE_S = 5.0
# Node directories may be host memory, and what they are for is the newest step.
KEEP_LOCAL = RetentionRule(keep_latest_k=2, keep_best=0)


class CheckpointSaver:
    """Saves the state of all ranks as one checkpoint, without holding training up.

    Args:
        place: where this attempt's checkpoints go. When a later attempt takes it over, every save
            fails and nothing is pruned.
        attempt: its number.
        prefix: first part of every checkpoint's name.
        rank: position in `process_group`.
        world_size: number of ranks that save together.
        store: seen by all ranks (None if `world_size` is 1).
        process_group: a gloo group for control messages (None if `world_size` is 1). Used only by
            a save whose tensors differ in names, sizes or dtypes from the save before.
        is_async: return from `save` after staging; otherwise after the verdict.
        executor: does whatever touches the storage; None: threads of this process.
        node_tier: directories of the nodes themselves. Saves go there first, and those that are
            meant for the storage from there to it.
        node_executor: as `executor`, for that tier.
        overlaps_staging: return from `save` before most tensors are copied. The caller then calls
            `finish_staging` before it changes them.
        plan_fingerprint: stored in the manifest.
        hash: what files and chunks are hashed with; the same on all ranks.
        on_event: called with event name, step and fields, also from the writer's thread.
        timeout_s: longest time from the end of staging until every rank's part is on storage; the
            verdict comes at most a third later.
        retention: if given, rank 0 prunes by it after each commit.
        on_point: called at every point that a save passes, wherever that is.
        safe_step: step of the checkpoint that the run has continued from, if any.

    All ranks make the same sequence of `save` calls with the same steps, at step boundaries.
    `is_busy` and `poll` may differ between ranks at a given step: agree on what follows from them
    before acting on it. Methods are called from one thread.
    """

    def __init__(  # noqa: PLR0913  # who, where, through what, how: few of them have a default
        self,
        *,
        place: Place,
        attempt: int,
        prefix: str,
        rank: int,
        world_size: int,
        store: Store | None,
        process_group: ProcessGroup | None,
        is_async: bool,
        plan_fingerprint: str,
        on_event: OnEvent,
        executor: Executor | None = None,
        node_tier: NodeTier | None = None,
        node_executor: Executor | None = None,
        overlaps_staging: bool = False,
        timeout_s: float = 300.0,
        retention: RetentionRule | None = None,
        on_point: OnPoint = pass_by,
        safe_step: int | None = None,
        hash: HashAlgorithm = HashAlgorithm.XXH3_128,
    ) -> None:
        assert is_async or not overlaps_staging, "a save that waits for its end overlaps nothing"
        self._rank = rank
        self._is_async = is_async
        self._planner = SavePlanner(
            prefix=prefix,
            attempt=attempt,
            rank=rank,
            world_size=world_size,
            process_group=process_group,
            plan_fingerprint=plan_fingerprint,
            hash=hash,
            on_point=on_point,
        )
        self._safe = SafeStep(safe_step)

        def writer(
            tier: Tier,
            place: Place,
            executor: Executor | None,
            retention: RetentionRule | None,
            roles: NodeRoles | None,
        ) -> TierWriter:
            topics = roles.topics if roles is not None else ()
            return TierWriter(
                tier=tier,
                rank=rank,
                prefix=prefix,
                place=place,
                board=VerdictBoard(store, rank=rank, world_size=world_size, topics=topics),
                executor=executor or ThreadExecutor(),
                on_event=on_event,
                timeout_s=timeout_s,
                retention=retention,
                safe=self._safe,
                roles=roles,
            )

        self._storage = writer(Tier.STORAGE, place, executor, retention, None)
        self._writers = [self._storage]
        if node_tier is not None:
            local = writer(Tier.LOCAL, node_tier.place, node_executor, KEEP_LOCAL, node_tier.roles)
            self._writers.insert(0, local)  # nearest first
        # Every save ends by itself before that, as a failure if need be.
        self._longest_s = VERDICT_GRACE * timeout_s + 3 * clear_up_s(timeout_s)
        self._stager = Stager(
            is_shared=any(isinstance(item, WriterProcess) for item in (executor, node_executor)),
            executors=[item.executor for item in self._writers],
            overlaps=overlaps_staging,
            wait_s=self._longest_s,
            on_point=on_point,
            on_staged=self._tell_staged,
        )
        self._route = Route(self._stager, timeout_s=timeout_s, is_foreground=not is_async)
        self._in_flight = SavesInFlight()

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Those that there are, nearest first."""
        return tuple(writer.tier for writer in self._writers)

    @property
    def safe(self) -> SafeStep:
        """Newest step that is published anywhere, as far as this rank knows."""
        return self._safe

    def prepare(
        self, tensors: Mapping[str, torch.Tensor], may_be_infinite: Collection[str] = ()
    ) -> None:
        """Do ahead what else the first save of `tensors` would do: plan it, get the memory.

        Collective, as that save would be. The arguments are as of `SaveContent`.

        Raises:
            CheckpointError: they cannot be saved, on all ranks.
            OSError: there is no memory, on this rank.
        """
        self._stager.prepare(self._planner.layout_of(tensors, may_be_infinite), tensors)

    def is_prepared(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether saving `tensors` needs no word of another rank."""
        return self._planner.is_planned(tensors)

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        *,
        reason: str,
        metric: Metric | None = None,
        may_be_infinite: Collection[str] = (),
        changing: Collection[str] = (),
        tiers: Collection[Tier] = tuple(Tier),
    ) -> SaveHandle:
        """As `save_content` with that as the content."""
        content = SaveContent(
            step=step,
            tensors=tensors,
            state=state,
            reason=reason,
            metric=metric,
            may_be_infinite=may_be_infinite,
        )
        return self.save_content(content, changing=changing, tiers=tiers)

    def save_content(
        self,
        content: SaveContent,
        *,
        changing: Collection[str] = (),
        tiers: Collection[Tier] = tuple(Tier),
    ) -> SaveHandle:
        """Save `content` as the checkpoint of its step.

        Called by all ranks. Returns once the tensors may be changed (if staging overlaps: once
        those in `changing` may), or sooner if the save failed; never raises for a failed save.
        The first save of a structure is collective, later ones wait for nobody. If the save before
        is still being written on this rank, waits for its end.

        Args:
            content: tensors (plain or DTensor, by name) and the rest.
            changing: names of tensors that change before `finish_staging` is called.
            tiers: where it goes, as far as there are such tiers.

        Returns:
            What becomes of it in the nearest of its tiers; `poll` tells about all.
        """
        started_at_s, step = time.monotonic(), content.step
        targets = self._targets(step, tiers)
        for writer, handle in targets:
            self._in_flight.started(writer.tier, handle)
        self._check_executor(step)
        self._tell_started(step, content.reason, targets)
        try:
            layout = self._planner.layout_of(content.tensors, content.may_be_infinite)
            setup_s = time.monotonic() - started_at_s
        except Exception as error:  # noqa: BLE001  # a failed save never ends training
            self._fail_planning(targets, f"cannot plan the save: {error}", started_at_s)
            return targets[0][1]
        job = self._planner.job(
            content,
            targets[0][1],
            layout,
            token=self._planner.next_token(layout),
            started_at_s=started_at_s,
            setup_s=setup_s,
        )
        rest = self._stager.begin(job, content.tensors, frozenset(changing))
        self._start(job, rest, targets)
        return job.handle

    def stage_standing(
        self,
        content: SaveContent,
        *,
        tiers: Collection[Tier],
        after: torch.cuda.Event | None,
        wait_s: float,
    ) -> tuple[SaveHandle, Callable[[], None]]:
        """Begin a last save from beside a training that stands still; no rank waits for another.

        Called by all ranks, in any thread, while none is in another method. All of them must be
        prepared for the tensors. Returns when these are copied.

        Args:
            content: what is saved.
            tiers: where it goes, as far as there are such tiers.
            after: mark in the device's work that the copies wait for.
            wait_s: longest wait for the save before to need the staging memory no more.

        Returns:
            What becomes of it in the nearest of its tiers, and what brings the save to its end, as
            long as that takes.
        """
        layout = self._planner.layout_of(content.tensors, content.may_be_infinite)
        targets = self._targets(content.step, tiers)
        self._tell_started(content.step, content.reason, targets)
        job = self._planner.job(
            content,
            targets[0][1],
            layout,
            token=f"{layout.token}last",  # there is one, at most
            started_at_s=time.monotonic(),
        )
        job.retires = False  # there may be little time
        rest = self._stager.begin(job, content.tensors, frozenset(), after=after, wait_s=wait_s)
        if rest is not None:
            self._stager.finish(job, rest)

        return job.handle, lambda: self._route.run(job, None, targets)

    def finish_staging(self) -> None:
        """Wait until the tensors of the save that was started last may be changed; bounded."""
        self._stager.wait()

    def busy_tiers(self) -> frozenset[Tier]:
        """Tiers that a save of this rank is on its way to."""
        return self._in_flight.tiers()

    def is_busy(self) -> bool:
        """Whether a save of this rank is in flight."""
        return bool(self.busy_tiers())

    def progress(self) -> SaveProgress | None:
        """How far the save in flight is on this rank, on its way to the last tier; else None."""
        jobs = [
            (Tier.STORAGE, self._route.uploading),
            (self._writers[0].tier, self._stager.current),
        ]
        running = [(to, job) for to, job in jobs if job is not None and not job.handle.is_decided]
        if not running:
            return None
        tier, job = running[0]
        return SaveProgress(
            step=job.spec.step,
            tier=tier,
            num_bytes=job.num_bytes_done,
            size_bytes=job.layout.own.size,
            taken_s=time.monotonic() - job.started_at_s,
        )

    def poll(self) -> list[SaveOutcome]:
        """Outcomes of the saves that ended since the last call, oldest first.

        Also looks after what writes them: call it once a step.
        """
        self._check_executor(None)
        return self._in_flight.take_ended()

    @property
    def pending_step(self) -> int | None:
        """Newest step on its way to the nearest tier, None if nothing is."""
        return self._in_flight.newest_step(self._writers[0].tier)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all saves have ended; False if one has not after `timeout_s`.

        On rank 0 older checkpoints may be read back for that, longer than others wait for it.
        """
        return self._in_flight.wait(timeout_s)

    def wait_for_verdicts(self, timeout_s: float, tiers: Collection[Tier] = tuple(Tier)) -> bool:
        """Wait for what becomes of saves to `tiers`; False if one is not known by then."""
        return self._in_flight.wait_for_verdicts(timeout_s, tiers)

    def close(self, timeout_s: float) -> bool:
        """Wait for saves in flight and give up those that are not done after `timeout_s`.

        Returns False if one was given up. `poll` still returns the outcomes.
        """
        is_complete = self.wait(timeout_s)
        if not is_complete:
            for writer in self._writers:
                writer.cancel()
            self.wait(CLOSE_GRACE_S)
        for writer in self._writers:
            writer.executor.close(CLOSE_GRACE_S)
        return is_complete

    def _check_executor(self, step: int | None) -> None:
        for writer in self._writers:
            lost = writer.executor.check()
            if lost is not None:
                told = f"{lost}; {self._safe.tell()}"
                writer.emit(
                    EventName.WRITER_RESTART, step, tier=writer.tier, reason=lost, message=told
                )

    def _targets(self, step: int, tiers: Collection[Tier]) -> list[Target]:
        return [(writer, SaveHandle(step)) for writer in self._writers if writer.tier in tiers]

    def _tell_started(self, step: int, reason: str, targets: Sequence[Target]) -> None:
        if self._rank == 0:
            names = [writer.tier.value for writer, _ in targets]
            self._storage.emit(EventName.CHECKPOINT_STARTED, step, reason=reason, tiers=names)

    def _tell_staged(self, job: SaveJob) -> None:
        self._storage.emit(
            EventName.CHECKPOINT_STAGED,
            job.spec.step,
            stall_s=job.stall_s,
            setup_s=job.setup_s,
            postponed_s=job.postponed_s,
            bytes=job.layout.own.size,
        )

    def _start(self, job: SaveJob, rest: Rest | None, targets: Sequence[Target]) -> None:
        self._route.start(job, rest, targets)
        if not self._is_async:
            # Not for older ones to be read back: the others wait in a collective meanwhile.
            self.wait_for_verdicts(2 * len(targets) * self._longest_s)

    def _fail_planning(self, targets: Sequence[Target], reason: str, started_at_s: float) -> None:
        stall_s = time.monotonic() - started_at_s
        for writer, handle in targets:
            if self._rank == 0:
                writer.tell_failure(handle.step, reason)
            handle.fail(writer.tier, reason, stall_s)
