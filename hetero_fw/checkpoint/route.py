"""The way of a staged save through its tiers, nearest first."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hetero_fw.checkpoint.save_handle import SaveHandle, SaveOutcome
from hetero_fw.checkpoint.save_job import SaveJob
from hetero_fw.checkpoint.stager import Rest, Stager
from hetero_fw.checkpoint.writer import VERDICT_GRACE, TierWriter

logger = logging.getLogger(__name__)

Target = tuple[TierWriter, SaveHandle]


class Route:
    """Runs saves from the end of their staging to their last tier, each in the caller's thread.

    Args:
        stager: told when a save needs the staging memory no more: as soon as it is published in a
            nearer tier, from whose files it goes on.
        timeout_s: of one tier; bounds the wait for an earlier save on its way to a further one.
        is_foreground: training waits for the end.
    """

    def __init__(self, stager: Stager, *, timeout_s: float, is_foreground: bool) -> None:
        self._stager = stager
        self._timeout_s = timeout_s
        self._is_foreground = is_foreground
        self._turn = threading.Lock()
        self.uploading: SaveJob | None = None

    def start(self, job: SaveJob, rest: Rest | None, targets: Sequence[Target]) -> None:
        """`run` in a thread of its own: whatever ends that, the next save has a fresh one."""
        name = f"checkpoint-writer-{job.spec.step}"
        thread = threading.Thread(
            target=self.run, args=(job, rest, targets), name=name, daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # there is no room for one more
            if job.has_staging:
                self._stager.release()
            _fail_undecided(targets, str(error))

    def run(self, job: SaveJob, rest: Rest | None, targets: Sequence[Target]) -> None:
        """Bring the job to all its targets and set their handles, whatever happens."""
        (first, _), *further = targets
        holds_staging = job.has_staging
        problem = "it ended early"

        def on_verdict(is_committed: bool) -> None:
            nonlocal holds_staging
            # The next save need not wait until old ones are retired, nor for a slow storage.
            if holds_staging and (is_committed or not further):
                holds_staging = False
                self._stager.release()

        try:
            if rest is not None:
                self._stager.finish(job, rest)
            outcome = first.run(job, is_foreground=self._is_foreground, on_verdict=on_verdict)
            for writer, handle in further:
                self._upload(writer, _upload_of(job, handle, outcome))
        except Exception as error:
            problem = f"{problem}: {error!r}"
            logger.exception("the save of step %d ended early", job.spec.step)
        finally:
            if holds_staging:
                self._stager.release()
            # No save stays under way for ever because the one to a nearer tier broke.
            _fail_undecided(targets, problem)

    def _upload(self, writer: TierWriter, job: SaveJob) -> None:
        has_turn = self._turn.acquire(timeout=VERDICT_GRACE * self._timeout_s)

        def pass_on(is_committed: bool = False) -> None:
            nonlocal has_turn
            if has_turn:
                has_turn = False
                self._turn.release()

        try:
            job.staged_at_s = time.monotonic()
            self.uploading = job
            if not has_turn:
                job.error = "an earlier upload has not ended"
            writer.run(job, is_foreground=self._is_foreground, on_verdict=pass_on)
        finally:
            pass_on()


def _fail_undecided(targets: Sequence[Target], problem: str) -> None:
    for writer, handle in targets:
        if not handle.is_decided:
            writer.tell_failure(handle.step, problem)
            handle.fail(writer.tier, problem)


def _upload_of(job: SaveJob, handle: SaveHandle, local: SaveOutcome) -> SaveJob:
    """The same save on its way to the storage: from this node's file, if that is published."""
    source = None
    if local.ok and isinstance(local.path, Path):
        source = local.path / job.layout.own.file_name
    return SaveJob(
        handle=handle,
        sequence=job.sequence,
        spec=replace(job.spec, token=f"{job.spec.token}u"),
        layout=job.layout,
        may_be_infinite=None if local.ok else job.may_be_infinite,
        started_at_s=job.started_at_s,
        error=job.error,
        source=source,
        expected=None if source is None else job.written,
        retires=job.retires,
    )
