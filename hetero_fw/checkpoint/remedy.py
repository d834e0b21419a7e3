"""What may let a save succeed where one has failed."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass

from hetero_fw.checkpoint.executor import Executor
from hetero_fw.checkpoint.place import Place
from hetero_fw.checkpoint.retirement import Retirement
from hetero_fw.checkpoint.save_job import SaveJob
from hetero_fw.checkpoint.save_tasks import Remake
from hetero_fw.checkpoint.storage import StorageHangs
from hetero_fw.checkpoint.storage_error import PLACE_IS_GONE, lacks_room
from hetero_fw.checkpoint.unsettled import UnsettledSaves

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Rank 0, of one tier: does something about a failure before a save is tried again.

    Attributes:
        timeout_s: longest time from the end of staging until every rank's part is on storage.
        clear_up_s: longest time for making a place again, or withdrawing a save.
    """

    place: Place
    executor: Executor
    retirement: Retirement
    unsettled: UnsettledSaves
    timeout_s: float
    clear_up_s: float

    def lets_try_again(self, job: SaveJob, reason: str) -> bool:
        """Whether `job`, which has just failed for `reason`, finds the room now that it lacked.

        What earlier saves replaced may still be on its way out; if not, a checkpoint is deleted.
        All ranks wait meanwhile: ends before the time of the save does.
        """
        if job.storage_hangs or not lacks_room(reason) or not self._has_time(job, 1 / 2):
            return False
        if job.manifest is not None and not self._withdraw(job):
            return False  # it may be published, and would count as one of those that stay
        done = "an older checkpoint went only now"
        if not self.retirement.has_deleted_since(job.staged_at_s, wait_s=self.timeout_s / 8):
            done = job.remedy = self._make_room(job, self._deadline_s(job))
        if not self.retirement.has_deleted_since(job.staged_at_s) or not self._has_time(job, 1 / 4):
            return False
        logger.warning("%s; %s; the save of step %d is tried again", reason, done, job.spec.step)
        return True

    def for_the_next(self, job: SaveJob, reason: str) -> str:
        """Do what may let the save after `job` succeed; in words what was done, "" if nothing."""
        if not job.storage_hangs and PLACE_IS_GONE in reason:
            job.remedy = self._remake()
        elif not job.storage_hangs and lacks_room(reason) and not job.remedy:
            job.remedy = self._make_room(job)
        return f"; {job.remedy}" if job.remedy else ""

    def _deadline_s(self, job: SaveJob) -> float:
        return job.staged_at_s + self.timeout_s

    def _has_time(self, job: SaveJob, share: float) -> bool:
        """Whether that share of the save's time is left, and it was not given up."""
        left_s = self._deadline_s(job) - time.monotonic()
        return left_s >= share * self.timeout_s and not self.retirement.is_stopped

    def _withdraw(self, job: SaveJob) -> bool:
        """Whether what this rank has put on the storage is gone, its part included."""
        try:
            self.unsettled.clear_up(job, time.monotonic() + self.clear_up_s)
        except Exception as error:  # noqa: BLE001  # this save has failed already
            job.storage_hangs |= isinstance(error, StorageHangs)
            return False
        job.written = job.manifest = None
        return True

    def _make_room(self, job: SaveJob, deadline_s: float | None = None) -> str:
        try:
            return self.retirement.make_room(job.spec.on_point, deadline_s)
        except Exception as error:  # noqa: BLE001  # this save has failed already
            job.storage_hangs |= isinstance(error, StorageHangs)
            return f"no older one was deleted to make room: {str(error) or repr(error)}"

    def _remake(self) -> str:
        """Have a place where somebody has taken this one away."""
        deadline_s = time.monotonic() + self.clear_up_s
        with contextlib.suppress(Exception):
            if self.executor.run(Remake(place=self.place), deadline_s=deadline_s):
                return "it was made again, empty, for the next save"
        return ""
