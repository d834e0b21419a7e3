"""Save checkpoints beside training: stage in the foreground, write and publish in a thread."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.distributed.distributed_c10d import ProcessGroup, Store

from hetero_fw.checkpoint.commit import CommitSpec
from hetero_fw.checkpoint.directories import checkpoint_path
from hetero_fw.checkpoint.fencing import AttemptDirectories
from hetero_fw.checkpoint.manifest import Metric
from hetero_fw.checkpoint.save_handle import SaveHandle, SaveOutcome
from hetero_fw.checkpoint.save_point import OnPoint, SavePoint, pass_by
from hetero_fw.checkpoint.shard_layout import (
    SaveLayout,
    Structure,
    agree_on_layout,
    structure_of,
)
from hetero_fw.checkpoint.staging import StagingBuffer
from hetero_fw.checkpoint.verdict import VerdictBoard
from hetero_fw.checkpoint.writer import OnEvent, SaveJob, SaveWriter
from hetero_fw.errors import CheckpointError
from hetero_fw.monitoring import EventName
from hetero_fw.policies import RetentionRule

CLOSE_GRACE_S = 5.0


class CheckpointSaver:
    """Saves the state of all ranks as one checkpoint, without holding training up.

    Args:
        directories: of this attempt, on a file system that all ranks see; `claim_attempt` has made
            them. When a later attempt takes them away, every save fails and nothing is pruned.
        prefix: first part of every checkpoint's name.
        rank: position in `process_group`.
        world_size: number of ranks that save together.
        store: seen by all ranks (None if `world_size` is 1).
        process_group: a gloo group for control messages (None if `world_size` is 1). Used only by
            a save whose tensors differ in names, sizes or dtypes from the save before.
        is_async: return from `save` after staging; otherwise after the verdict.
        plan_fingerprint: stored in the manifest.
        on_event: called with event name, step and fields, also from the writer's thread.
        timeout_s: longest time from the end of staging to the verdict, and longest time that
            `save` waits for the save before.
        retention: if given, rank 0 prunes by it after each commit.
        on_point: called at every point that a save passes, also from the writer's thread.

    All ranks make the same sequence of `save` calls with the same steps, at step boundaries.
    `is_busy` and `poll` may differ between ranks at a given step: agree on what follows from them
    before acting on it. Methods are called from one thread.
    """

    def __init__(  # noqa: PLR0913  # who, where, through what, how: few of them have a default
        self,
        *,
        directories: AttemptDirectories,
        prefix: str,
        rank: int,
        world_size: int,
        store: Store | None,
        process_group: ProcessGroup | None,
        is_async: bool,
        plan_fingerprint: str,
        on_event: OnEvent,
        timeout_s: float = 300.0,
        retention: RetentionRule | None = None,
        on_point: OnPoint = pass_by,
    ) -> None:
        self._prefix = prefix
        self._directories = directories
        self._rank = rank
        self._world_size = world_size
        self._process_group = process_group
        self._is_async = is_async
        self._plan_fingerprint = plan_fingerprint
        self._timeout_s = timeout_s
        self._board = VerdictBoard(store, rank=rank, world_size=world_size)
        self._staging = StagingBuffer()
        self._writer = SaveWriter(
            rank=rank,
            prefix=prefix,
            board=self._board,
            staging=self._staging,
            on_event=on_event,
            timeout_s=timeout_s,
            retention=retention,
        )
        self._on_point = on_point
        self._layout: tuple[Structure, SaveLayout] | None = None
        self._sequence = 0
        self._in_flight: list[SaveHandle] = []
        self._unreported: list[SaveHandle] = []

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        *,
        reason: str,
        metric: Metric | None = None,
        may_be_infinite: Collection[str] = (),
    ) -> SaveHandle:
        """Save `tensors` (plain or DTensor, by name) and `state` as the checkpoint of `step`.

        Called by all ranks. Returns once the tensors may be changed, or sooner if the save
        failed; never raises for a failed save. The first save of a structure is collective, later
        ones wait for nobody. If the save before is still being written on this rank, waits for
        it, at most `timeout_s`; after that this save fails on all ranks.

        Args:
            step: optimizer steps completed.
            tensors: the same names, sizes and dtypes on all ranks.
            state: JSON values (a tuple comes back as a list, a key as a string); rank 0's counts.
            reason: why it is made, for the manifest and the events.
            metric: how good the weights are, for retention; rank 0's counts.
            may_be_infinite: names of tensors that may hold infinities, such as masks in buffers.
        """
        started_at_s = time.monotonic()
        handle = SaveHandle(step)
        self._unreported.append(handle)
        self._sequence += 1
        if self._rank == 0:
            self._writer.emit(EventName.CHECKPOINT_STARTED, step, reason=reason)
        try:
            layout = self._layout_for(tensors)
            setup_s = time.monotonic() - started_at_s
        except Exception as error:  # noqa: BLE001  # a failed save never ends training
            self._fail_planning(handle, f"cannot plan the save: {error}", started_at_s)
            return handle
        job = SaveJob(
            handle=handle,
            sequence=self._sequence,
            spec=self._spec(step, layout, reason, metric),
            layout=layout,
            may_be_infinite=frozenset(may_be_infinite),
            started_at_s=started_at_s,
            setup_s=setup_s,
        )
        self._stage(job, tensors, state)
        self._start(job)
        return handle

    def is_busy(self) -> bool:
        """Whether a save of this rank is in flight."""
        self._in_flight = [handle for handle in self._in_flight if not handle.is_done]
        return bool(self._in_flight)

    def poll(self) -> list[SaveOutcome]:
        """Outcomes of the saves that ended since the last call, oldest first."""
        ended = [(handle, handle.outcome) for handle in self._unreported]
        self._unreported = [handle for handle, outcome in ended if outcome is None]
        return [outcome for _, outcome in ended if outcome is not None]

    def wait(self, timeout_s: float) -> bool:
        """Wait for all saves in flight; False if one still is after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        return all(
            handle.wait(max(0.0, deadline_s - time.monotonic())) for handle in self._in_flight
        )

    def close(self, timeout_s: float) -> bool:
        """Wait for saves in flight and give up those that are not done after `timeout_s`.

        Returns False if one was given up. `poll` still returns the outcomes.
        """
        is_complete = self.wait(timeout_s)
        if not is_complete:
            self._board.cancel()
            self.wait(CLOSE_GRACE_S)
        return is_complete

    def _layout_for(self, tensors: Mapping[str, torch.Tensor]) -> SaveLayout:
        structure = structure_of(tensors)
        if self._layout is None or self._layout[0] != structure:
            layout = agree_on_layout(
                tensors,
                rank=self._rank,
                world_size=self._world_size,
                process_group=self._process_group,
            )
            self._layout = (structure, layout)
        return self._layout[1]

    def _spec(
        self, step: int, layout: SaveLayout, reason: str, metric: Metric | None
    ) -> CommitSpec:
        return CommitSpec(
            final=checkpoint_path(self._directories.root, self._prefix, step),
            directories=self._directories,
            token=f"{layout.token}{self._sequence:04x}",
            step=step,
            plan_fingerprint=self._plan_fingerprint,
            world_size=self._world_size,
            reason=reason,
            metric=metric,
            on_point=self._on_point,
        )

    def _stage(
        self, job: SaveJob, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]
    ) -> None:
        try:
            if self._rank == 0:
                job.spec.state.update(json.loads(json.dumps(state)))
            job.postponed_s = self._wait_for_previous()
            prepare_at_s = time.monotonic()
            self._on_point(SavePoint.STAGING)
            self._staging.prepare(job.layout.own, tensors)
            job.setup_s += time.monotonic() - prepare_at_s
            self._staging.stage(job.layout.own, job.layout.planner, tensors)
            self._on_point(SavePoint.STAGED)
        except Exception as error:  # noqa: BLE001  # the writer tells the other ranks
            job.error = f"cannot stage: {error}"
        job.staged_at_s = time.monotonic()
        if job.error is None:
            self._writer.emit(
                EventName.CHECKPOINT_STAGED,
                job.spec.step,
                stall_s=job.stall_s,
                setup_s=job.setup_s,
                postponed_s=job.postponed_s,
                bytes=job.layout.own.size,
            )

    def _wait_for_previous(self) -> float:
        started_at_s = time.monotonic()
        if not self.wait(self._timeout_s):
            earlier = [handle.step for handle in self._in_flight if not handle.is_done]
            raise CheckpointError(
                f"postponed for {self._timeout_s:.0f} s, but steps {earlier} are still being saved"
            )
        return time.monotonic() - started_at_s

    def _start(self, job: SaveJob) -> None:
        if not self._is_async:
            self._writer.run(job, is_foreground=True)
            return
        self._in_flight = [handle for handle in self._in_flight if not handle.is_done]
        self._in_flight.append(job.handle)
        # A thread of its own for each save: whatever ends it, the next save has a fresh one.
        threading.Thread(
            target=self._writer.run,
            args=(job,),
            kwargs={"is_foreground": False},
            name=f"checkpoint-writer-{job.spec.step}",
            daemon=True,
        ).start()

    def _fail_planning(self, handle: SaveHandle, reason: str, started_at_s: float) -> None:
        if self._rank == 0:
            self._writer.emit(EventName.CHECKPOINT_FAILED, handle.step, reason=reason)
        stall_s = time.monotonic() - started_at_s
        handle.finish(
            SaveOutcome(step=handle.step, ok=False, reason=reason, stall_s=stall_s, persist_s=0.0)
        )
