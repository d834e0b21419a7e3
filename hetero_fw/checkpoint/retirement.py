"""Old checkpoints of one tier go, once enough of the newer ones were read back."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from hetero_fw.checkpoint.executor import Executor, taking_turn
from hetero_fw.checkpoint.place import Place
from hetero_fw.checkpoint.pruning import Decide, PruneReport
from hetero_fw.checkpoint.read_back import NOTHING_READ
from hetero_fw.checkpoint.save_point import OnPoint
from hetero_fw.checkpoint.save_tasks import Prune
from hetero_fw.policies import RetentionRule, decide_retention, decide_room

# Reading back is cut into pieces of this length, between which a save may come in.
_SLICE_S = 0.5
_PAUSE_S = 0.01


class Retirement:
    """Deletes by a retention rule, in one place of a tier.

    Large checkpoints take longer to read than a save may take. So reading goes on from save to
    save, and is no failure of the storage as long as bytes arrive.

    Attributes:
        rule: None: nothing goes.
        is_stopped: nothing is read any more; a later attempt goes on.

    Args:
        timeout_s: longest time without a byte, and about the longest that one call reads.
        counts_unread: what this attempt has committed needs no reading: of node directories,
            nobody can read a checkpoint of which every node has a part. What counts there is that
            each part was hashed on arrival.
        on_report: told after every piece of work.
    """

    def __init__(
        self,
        *,
        place: Place,
        prefix: str,
        executor: Executor,
        rule: RetentionRule | None,
        timeout_s: float,
        counts_unread: bool,
        on_report: Callable[[PruneReport], None] = lambda report: None,
    ) -> None:
        self.rule = rule
        self.is_stopped = False
        self._place = place
        self._prefix = prefix
        self._executor = executor
        self._timeout_s = timeout_s
        self._counts_unread = counts_unread
        self._on_report = on_report
        self._intact = NOTHING_READ
        self._committed: deque[int] = deque()  # steps that count unread
        self._turn = threading.Lock()  # of a slice
        # A save may end while checkpoints are still read back because of the one before it.
        self._retiring = threading.Lock()
        self._is_due = False
        self._has_made_room = False  # since the last save that succeeded
        self._deleted_at_s = -math.inf

    def stop(self) -> None:
        """End what is under way, after the slice that is being read."""
        self.is_stopped = True

    def after_save(self, step: int, on_point: OnPoint) -> None:
        """Delete what the checkpoint of `step` replaces; it was published just now.

        Returns at once while another call is at it, which goes on with this one.

        Raises:
            Exception: whatever the storage answers; nothing is deleted that was not to go.
        """
        self._has_made_room = False
        if self.rule is None:
            return
        if self._counts_unread:
            self._committed.append(step)
        self._is_due = True
        while self._is_due and not self.is_stopped and self._retiring.acquire(blocking=False):
            try:
                self._is_due = False
                self._prune(self.rule, on_point, decide_retention, self._timeout_s)
            except Exception:
                if not self._is_due:  # else another save has come meanwhile
                    raise
            finally:
                self._retiring.release()

    def has_deleted_since(self, time_s: float, wait_s: float = 0.0) -> bool:
        """Whether a checkpoint has gone since then, by the monotonic clock.

        Args:
            wait_s: longest wait for the end of what is under way.
        """
        ends_s = time.monotonic() + wait_s
        while self._retiring.locked() and not self.is_stopped and time.monotonic() < ends_s:
            time.sleep(_PAUSE_S)
        return self._deleted_at_s >= time_s

    def make_room(self, on_point: OnPoint, deadline_s: float | None = None) -> str:
        """Delete a checkpoint, where more are kept than must be; in words, "" if none went.

        Args:
            deadline_s: when it has ended, by the monotonic clock; None: others need not wait.

        Raises:
            StorageHangs: it has not.
            Exception: whatever the storage answers.
        """
        rule = self.rule
        if rule is None or self._counts_unread or self.is_stopped:
            return ""
        decide = functools.partial(decide_room, spares_kept_besides=self._has_made_room)
        report = self._prune(rule, on_point, decide, self._timeout_s / 4, deadline_s)
        if not report.deleted:
            return ""
        self._has_made_room = True
        self.rule = report.rule or rule
        changed = [
            f"ckpt.{key}={getattr(self.rule, key)}"
            for key in ("keep_latest_k", "keep_best")
            if getattr(self.rule, key) != getattr(rule, key)
        ]
        text = f"{report.deleted[0].name} was deleted to make room"
        return text + (f" and {', '.join(changed)} holds from now on" if changed else "")

    def _prune(
        self,
        rule: RetentionRule,
        on_point: OnPoint,
        decide: Decide,
        time_s: float,
        deadline_s: float | None = None,
    ) -> PruneReport:
        """Read for about `time_s`, and delete as far as that allows."""
        ends_s = time.monotonic() + time_s
        patience_s = self._timeout_s if deadline_s is None else None
        while True:
            now_s = time.monotonic()
            # A slice waits for the executor, and then has its own time.
            with taking_turn(self._turn, deadline_s or now_s + 3 * self._timeout_s, None):
                report = self._executor.run(
                    self._slice(rule, on_point, decide),
                    deadline_s=deadline_s or time.monotonic() + self._timeout_s,
                    patience_s=patience_s,
                )
                self._intact = report.intact
                if report.deleted:
                    self._deleted_at_s = time.monotonic()
            self._on_report(report)
            has_room = report.deleted and decide is not decide_retention
            if report.is_complete or has_room or self.is_stopped or time.monotonic() > ends_s:
                return report
            time.sleep(_PAUSE_S)  # whoever waits for the executor has it now

    def _slice(self, rule: RetentionRule, on_point: OnPoint, decide: Decide) -> Prune:
        while self._committed:
            step = self._committed.popleft()
            self._intact = replace(self._intact, unread=self._intact.unread | {step})
        return Prune(
            place=self._place,
            prefix=self._prefix,
            rule=rule,
            intact=self._intact,
            read_s=min(_SLICE_S, self._timeout_s / 4),
            on_point=on_point,
            decide=decide,
        )
