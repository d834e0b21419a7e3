"""The foreground half of a save: get the tensors out of training's way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hetero_fw.checkpoint.executor import Executor
from hetero_fw.checkpoint.save_job import SaveJob
from hetero_fw.checkpoint.save_point import OnPoint, SavePoint
from hetero_fw.checkpoint.shard_layout import SaveLayout
from hetero_fw.checkpoint.staging import StagingBuffer, StagingCopy
from hetero_fw.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Rest:
    """What is left to copy, and the mark in the device's work that it waits for."""

    copies: list[StagingCopy]
    after: torch.cuda.Event | None


class Stager:
    """Copies the tensors of one save after the other to memory that all of them use.

    Args:
        is_shared: whether another process reads the memory.
        executors: see the memory once it is there.
        overlaps: copy only what changes soon at once, the rest in the save's own thread.
        wait_s: longest wait for the memory, which the save before may still need.
        on_staged: called when a job's tensors are copied.
    """

    def __init__(
        self,
        *,
        is_shared: bool,
        executors: Sequence[Executor],
        overlaps: bool,
        wait_s: float,
        on_point: OnPoint,
        on_staged: Callable[[SaveJob], None],
    ) -> None:
        self._buffer = StagingBuffer(is_shared=is_shared)
        self._executors = executors
        self._overlaps = overlaps
        self._wait_s = wait_s
        self._on_point = on_point
        self._on_staged = on_staged
        self._is_free = threading.Event()
        self._is_free.set()
        self.current: SaveJob | None = None

    def prepare(self, layout: SaveLayout, tensors: Mapping[str, torch.Tensor]) -> None:
        """Get the memory for saves of `layout`, and show it to whatever reads it."""
        before = self._buffer.memory
        self._buffer.prepare(layout.own, tensors)
        memory = self._buffer.memory
        if memory is not None and memory is not before:
            for executor in self._executors:
                executor.attach(memory)

    def begin(
        self,
        job: SaveJob,
        tensors: Mapping[str, torch.Tensor],
        changing: frozenset[str],
        *,
        after: torch.cuda.Event | None = None,
        wait_s: float | None = None,
    ) -> Rest | None:
        """Copy what changes soon; returns what is left to copy, None if nothing is.

        Args:
            after: mark in the device's work that the copies wait for; None: as it stands now.
            wait_s: longest wait for the memory, if it is another than usual.
        """
        rest = None
        try:
            if job.error is None:
                job.postponed_s = self._take_memory(self._wait_s if wait_s is None else wait_s)
                job.has_staging = True
                self.current = job
                rest = self._copy(job, tensors, changing, after)
        except Exception as error:  # noqa: BLE001  # the writer tells the other ranks
            job.error = f"cannot stage: {error}"
        taken_s = time.monotonic() - job.started_at_s
        job.stall_s = taken_s - job.setup_s - job.postponed_s
        if rest is None:
            self._end(job)
        return rest

    def finish(self, job: SaveJob, rest: Rest) -> None:
        """Copy what `begin` has left; in any thread."""
        try:
            self._buffer.copy(rest.copies, rest.after)
        except Exception as error:  # noqa: BLE001  # thread boundary; training goes on
            job.error = f"cannot stage: {error}"
        self._end(job)

    def wait(self) -> None:
        """Wait until the tensors of the current save may be changed; bounded."""
        job = self.current
        if job is None or job.is_staged.is_set():
            return
        began_s = time.monotonic()
        if not job.is_staged.wait(self._wait_s):
            job.error = f"staging took longer than {self._wait_s:.0f} s"
        job.stall_s += time.monotonic() - began_s

    def release(self) -> None:
        """The current save needs the memory no more."""
        self._is_free.set()

    def _take_memory(self, wait_s: float) -> float:
        started_at_s = time.monotonic()
        if not self._is_free.wait(wait_s):
            raise CheckpointError("the save before still needs the staging memory")
        self._is_free.clear()
        return time.monotonic() - started_at_s

    def _copy(
        self,
        job: SaveJob,
        tensors: Mapping[str, torch.Tensor],
        changing: frozenset[str],
        after: torch.cuda.Event | None,
    ) -> Rest | None:
        self._on_point(SavePoint.STAGING)
        prepare_at_s = time.monotonic()
        self.prepare(job.layout, tensors)
        job.setup_s += time.monotonic() - prepare_at_s
        copies = self._buffer.resolve(job.layout.own, job.layout.planner, tensors)
        mark = after or self._buffer.mark()
        if not self._overlaps:
            self._buffer.copy(copies, mark)
            return None
        self._buffer.copy([item for item in copies if item.fqn in changing], mark)
        return Rest(copies=[item for item in copies if item.fqn not in changing], after=mark)

    def _end(self, job: SaveJob) -> None:
        if job.error is None and not job.is_unchanged():
            job.error = (
                "weights were changed outside of the optimizer's step while they were copied"
            )
        if job.error is None:
            try:
                self._on_point(SavePoint.STAGED)
            except Exception as error:  # noqa: BLE001  # the writer tells the other ranks
                job.error = f"cannot stage: {error}"
        job.staged_at_s = time.monotonic()
        job.is_staged.set()
        if job.error is None:
            self._on_staged(job)
