"""Save the last finished step when a rank has raised an exception, before the attempt ends."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from hetero_fw.callbacks.tier_schedule import TierSchedule
from hetero_fw.checkpoint import CheckpointSaver, JustInTimeSave, SaveOutcome, StandingStep
from hetero_fw.monitoring import EventLog, EventName
from hetero_fw.policies import (
    PERMANENT,
    JustInTimeDecision,
    JustInTimeObservation,
    Tier,
    decide_just_in_time,
)
from hetero_fw.recovery import classify_exception

# Being ready may take this part of a step, by the median of so many.
_MAX_SHARE = 0.02
_NUM_COSTS = 20


class JustInTimeCheckpoint(Callback):
    """Told when training rests, after whatever saves then.

    Args:
        part: this rank's part in such a save.
        stand: the training as it stands after the step that has just ended.
        saver: of this rank.
        schedules: of the tiers, nearest first.
        grace_s: longest time that a rank that has raised stays for the save.
        is_last_attempt: no other follows by itself, whatever happens.
        announce: shows a line to the user.
    """

    def __init__(  # noqa: PLR0913  # facts of the run, few of which have a default
        self,
        *,
        part: JustInTimeSave,
        stand: Callable[[int], StandingStep],
        saver: CheckpointSaver,
        schedules: Sequence[TierSchedule],
        events: EventLog,
        rank: int,
        grace_s: float,
        is_last_attempt: bool = False,
        announce: Callable[[str], None] = print,
    ) -> None:
        self._part = part
        self._stand = stand
        self._saver = saver
        self._schedules = schedules
        self._events = events
        self._rank = rank
        self._grace_s = grace_s
        self._is_last_attempt = is_last_attempt
        self._announce = announce
        self._step: int | None = None
        self._costs_s: deque[float] = deque(maxlen=_NUM_COSTS)
        self._is_too_dear = False

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._part.start()

    def rest(self, step: int) -> None:
        """Training rests after `step`."""
        self._step = step
        if self._is_too_dear:
            return
        began_s = time.perf_counter()
        self._part.stand(self._stand(step))
        self._watch_cost(time.perf_counter() - began_s)

    def move(self) -> None:
        """Weights may change again."""
        self._part.move()

    def _watch_cost(self, taken_s: float) -> None:
        """Give up where what every step pays is too much for what an exception would cost."""
        step_s = self._schedules[0].step_time_s
        self._costs_s.append(taken_s)
        if step_s is None or len(self._costs_s) < _NUM_COSTS:
            return
        cost_s = statistics.median(self._costs_s)
        if cost_s > _MAX_SHARE * step_s:
            self._is_too_dear = True
            self._announce(
                f"rank {self._rank} is not ready to save when a rank raises: to keep its buffers "
                f"and the state of its callbacks at hand takes {cost_s:.2g} s of {step_s:.2g} s"
            )

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._save(exception)
        self._part.stop()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._part.stop()

    def _save(self, exception: BaseException) -> None:
        """Save the step that all stand at, or else let the save under way come to its end."""
        step, pending = self._part.step, self._saver.pending_step
        is_saved = False
        if step is None and self._step is not None:
            self._announce(
                f"rank {self._rank} has raised while weights changed after step {self._step}, so "
                f"nothing is saved now; {self._saver.safe.tell()}"
            )
        if step is not None and step not in (pending, self._saver.safe.step):
            decision = self._decide(step)
            outcome = self._ask(exception) if decision.save else decision.reason
            is_saved = _is_saved(outcome)
            # Ranks that lost a peer raise too, and have nothing to add.
            if self._part.has_led or not decision.save:
                self._tell(step, decision, outcome, exception)
        if pending is not None and not is_saved and self._decide(pending).save:
            self._saver.wait_for_verdicts(self._grace_s, self._nearest)

    @property
    def _nearest(self) -> list[Tier]:
        return [self._schedules[0].tier]

    def _decide(self, step: int) -> JustInTimeDecision:
        nearest = self._schedules[0]
        return decide_just_in_time(
            JustInTimeObservation(
                step=step,
                safe_step=self._saver.safe.step or 0,
                step_time_s=nearest.step_time_s,
                save_time_s=nearest.persist_time_s,
                grace_s=self._grace_s,
            )
        )

    def _ask(self, exception: BaseException) -> SaveOutcome | str:
        reason = f"exception on rank {self._rank}: {type(exception).__name__}"
        return self._part.ask(reason, self._tiers_after(exception), self._grace_s)

    def _tiers_after(self, exception: BaseException) -> list[Tier]:
        """The nearest serves the next attempt; what no attempt follows goes all the way."""
        is_last = self._is_last_attempt or classify_exception(exception) in PERMANENT
        return [schedule.tier for schedule in self._schedules] if is_last else self._nearest

    def _tell(
        self,
        step: int,
        decision: JustInTimeDecision,
        outcome: SaveOutcome | str,
        exception: BaseException,
    ) -> None:
        is_saved = _is_saved(outcome)
        why = outcome.reason if isinstance(outcome, SaveOutcome) else outcome
        self._events.write(
            EventName.EMERGENCY_SAVE,
            step,
            asking_rank=self._rank,
            is_saved=is_saved,
            reason=f"{type(exception).__name__}; {decision.reason if is_saved else why}",
        )
        if is_saved:
            self._announce(f"rank {self._rank} has raised; step {step} is saved: {decision.reason}")
        elif decision.save:
            self._announce(
                f"rank {self._rank} has raised; step {step} is not saved: {why}; "
                f"{self._saver.safe.tell()}"
            )


def _is_saved(outcome: SaveOutcome | str) -> bool:
    return isinstance(outcome, SaveOutcome) and outcome.ok
