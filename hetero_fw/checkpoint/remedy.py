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
from hetero_fw.checkpoint.storage_error import PLACE_IS_GONE, lacks_room

logger = logging.getLogger(__name__)

# Making room may take so much of the time of a save; the other half is for writing again.
_SHARE_FOR_ROOM = 0.5


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Rank 0, of one tier: does something about a failure before a save is tried again.

    Attributes:
        timeout_s: longest time from the end of staging until every rank's part is on storage.
        clear_up_s: longest time for making a place again.
    """

    place: Place
    executor: Executor
    retirement: Retirement
    timeout_s: float
    clear_up_s: float

    def lets_try_again(self, job: SaveJob, reason: str) -> bool:
        """Whether `job`, which has just failed for `reason`, finds the room now that it lacked.

        A checkpoint is deleted for it, or has been meanwhile: those that earlier saves replaced may
        still be on their way out.
        """
        left_s = job.staged_at_s + self.timeout_s - time.monotonic()
        if job.storage_hangs or left_s <= 0 or not lacks_room(reason):
            return False
        job.remedy = self._make_room(job, _SHARE_FOR_ROOM * left_s)
        if not self.retirement.has_deleted_since(job.started_at_s):
            return False
        done = job.remedy or "an older checkpoint went only now"
        logger.warning("%s; %s; the save of step %d is tried again", reason, done, job.spec.step)
        return True

    def for_the_next(self, job: SaveJob, reason: str) -> str:
        """Do what may let the save after `job` succeed; in words what was done, "" if nothing."""
        if job.storage_hangs:
            return ""
        if PLACE_IS_GONE in reason:
            job.remedy = self._remake()
        elif lacks_room(reason) and not job.remedy:
            job.remedy = self._make_room(job, self.timeout_s)
        return f"; {job.remedy}" if job.remedy else ""

    def _make_room(self, job: SaveJob, within_s: float) -> str:
        try:
            within_s = min(within_s, self.timeout_s / 4)
            return self.retirement.make_room(job.spec.on_point, within_s)
        except Exception as error:  # noqa: BLE001  # this save has failed already
            return f"no older one was deleted to make room: {str(error) or repr(error)}"

    def _remake(self) -> str:
        """Have a place where somebody has taken this one away."""
        deadline_s = time.monotonic() + self.clear_up_s
        with contextlib.suppress(Exception):
            if self.executor.run(Remake(place=self.place), deadline_s=deadline_s):
                return "it was made again, empty, for the next save"
        return ""
