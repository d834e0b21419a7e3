"""Saves that ended for a rank before it could know what became of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from hetero_fw.checkpoint.executor import Executor
from hetero_fw.checkpoint.place import Place
from hetero_fw.checkpoint.save_job import SaveJob
from hetero_fw.checkpoint.save_tasks import Discard
from hetero_fw.checkpoint.storage_error import lacks_room
from hetero_fw.checkpoint.verdict import VerdictBoard
from hetero_fw.errors import CheckpointError

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class UnsettledSaves:
    """What this rank must not clear up after yet, for the checkpoint may exist.

    That is so where no verdict has come, since rank 0 may have published all the same, and where
    publishing hung, since the request may come through once the storage is well. What stays
    unsettled at the end of the attempt is cleared up when the next one begins.
    """

    place: Place
    board: VerdictBoard
    executor: Executor
    jobs: list[SaveJob] = field(default_factory=list)

    def add(self, job: SaveJob) -> None:
        """Leave the parts of `job` as they are for now."""
        if job not in self.jobs:
            self.jobs.append(job)

    def clear_up(self, job: SaveJob, deadline_s: float) -> None:
        """Remove what this rank has put on the storage for a save that failed.

        Raises:
            Exception: it is still there.
        """
        name = job.layout.own.file_name
        task = Discard(place=self.place, spec=job.spec, file_name=name, manifest=job.manifest)
        self.executor.run(task, deadline_s=deadline_s)

    def write(self, write: Callable[[], T], within_s: float) -> T:
        """Call `write`, and settle once it has shown that the storage is well.

        What is left of earlier saves may hold the room that it lacks: then it is called once more.
        """
        try:
            written = write()
        except CheckpointError as error:
            if not self.jobs or not lacks_room(str(error)):
                raise
            self.settle(within_s)
            return write()
        self.settle(within_s)
        return written

    def settle(self, within_s: float) -> None:
        """Make those that have failed by now be gone; to be called while the storage is well."""
        jobs, self.jobs = self.jobs, []
        deadline_s = time.monotonic() + within_s
        for job in jobs:
            try:
                verdict = self.board.verdict(job.spec.token)
                if verdict is None or verdict.is_committed:
                    continue
                self.clear_up(job, deadline_s)
            except Exception as error:  # noqa: BLE001  # the save at hand goes on
                logger.warning("what is left of step %d stays: %s", job.spec.step, error)
