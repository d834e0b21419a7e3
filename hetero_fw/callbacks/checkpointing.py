"""Save when the policy says so, at a step boundary that all ranks have agreed on."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from hetero_fw.callbacks.save_progress import SaveProgressLines
from hetero_fw.callbacks.tier_schedule import TierSchedule, from_number, to_number
from hetero_fw.checkpoint import CheckpointSaver
from hetero_fw.monitoring import EventLog, EventName
from hetero_fw.parallel import StepSource
from hetero_fw.policies import Tier


class StopSource(Protocol):
    """Whatever notes that a stop was asked for."""

    signal_number: int


class AdaptiveCheckpoint(Callback):
    """Asks the policy once a step on rank 0; the answer reaches all ranks with the step's report.

    Attributes:
        was_preempted: a stop was asked for and training has ended because of it.

    Args:
        source: the strategy.
        saver: None: checkpoints are off, stop requests are still obeyed.
        schedules: of the tiers, nearest first.
        save: hands the training as it stands to `saver`, for a step, a reason and tiers.
        first_step: the step training starts from.
        max_steps: the step it ends with.
        events: told of saves that are postponed.
        close_timeout_s: longest wait for the saves in flight at the end.
        announce: shows a line to the user.
    """

    def __init__(  # noqa: PLR0913  # facts of the run, none of which has a default
        self,
        *,
        source: StepSource,
        saver: CheckpointSaver | None,
        schedules: Sequence[TierSchedule],
        save: Callable[[int, str, Collection[Tier]], None],
        stop: StopSource,
        first_step: int,
        max_steps: int,
        rank: int,
        events: EventLog,
        close_timeout_s: float,
        announce: Callable[[str], None] = print,
    ) -> None:
        self._source = source
        self._saver = saver
        self._schedules = schedules if saver is not None else ()
        self._save_training = save
        self._stop = stop
        self._step = first_step
        self._max_steps = max_steps
        self._rank = rank
        self._events = events
        self._close_timeout_s = close_timeout_s
        self._progress = SaveProgressLines(saver if rank == 0 else None, announce)
        self._saving: frozenset[Tier] = frozenset()
        self._wanted: dict[Tier, None] = {}
        self._why: dict[str, None] = {}
        self._reasons: dict[Tier, str] = {}
        self._owed: dict[Tier, str] = {}  # what an emergency wants there, and nobody could yet
        self._awaited_step: int | None = None
        self._began_s = self._boundary_s = time.perf_counter()
        self._is_disturbed = True  # the first step warms up
        self._stood_still_s = 0.0
        self._validation_began_s = 0.0
        self.was_preempted = False

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether a signal has asked this rank to stop."""
        return bool(self._stop.signal_number)

    def notes(self) -> dict[str, float]:
        """This rank's part of the step report: stop, busy, and on rank 0 what to save to."""
        busy = self._saver.busy_tiers() if self._saver is not None else frozenset()
        if self._rank == 0:
            self._reasons = self._decide(busy | self._saving)
        return {
            "stop_signal": float(self._stop.signal_number),
            "is_saving": to_number(busy),
            "wants_save": to_number(self._reasons),
        }

    def _decide(self, saving: frozenset[Tier]) -> dict[Tier, str]:
        """Rank 0: the tiers to save to, and why."""
        elapsed_s = time.perf_counter() - self._began_s
        reasons: dict[Tier, str] = {}
        for schedule in self._schedules:
            in_flight = self._in_the_way(schedule, saving)
            decision = schedule.decide(
                self._step + 1, elapsed_s, save_in_flight=in_flight is not None
            )
            if decision.save:
                reasons[schedule.tier] = decision.reason
            elif in_flight is not None and schedule.num_postponed == 1:
                self._tell_postponed(schedule, self._step + 1, in_flight, decision.reason)
        return reasons

    def _in_the_way(self, schedule: TierSchedule, saving: frozenset[Tier]) -> TierSchedule | None:
        """The tier whose save in flight a save to that of `schedule` has to wait for."""
        # What goes further goes through the nearest tier.
        ways = (schedule, *self._schedules[:1])
        return next((way for way in ways if way.tier in saving), None)

    def _tell_postponed(
        self, schedule: TierSchedule, step: int, in_flight: TierSchedule, reason: str
    ) -> None:
        """One rank, once for each postponement: a save after `step` is due and has to wait."""
        self._events.write(
            EventName.CHECKPOINT_POSTPONED,
            step,
            tier=schedule.tier,
            in_flight_tier=in_flight.tier,
            in_flight_step=in_flight.last_saved_step,
            reason=reason,
        )

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Comes after the restore. No step follows after which a tier that lags could be saved to.

        What was restored is not saved again to the tier that it came from.
        """
        behind = [s for s in self._schedules if self._step > s.last_saved_step]
        if self._step >= self._max_steps and behind:
            for schedule in behind:
                schedule.save_began(self._step)
            reason = f"final step {self._step}, which was not there yet"
            with self._progress.while_waiting():
                self._save_training(self._step, reason, [schedule.tier for schedule in behind])

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._step = trainer.global_step
        self._measure_step()
        reports = self._source.finished_step.reports
        self._saving = frozenset().union(*(from_number(report.is_saving) for report in reports))
        signal_number = int(max(report.stop_signal for report in reports))
        if signal_number:
            self.save_now(f"stop by signal {signal_number}")
        elif wanted := from_number(reports[0].wants_save):
            self._want(wanted, "; ".join(dict.fromkeys(self._reasons.values())))
        self._settle_owed()
        self._collect()
        self._progress.tell()
        if signal_number and self._step < self._max_steps:
            self.was_preempted = True
            trainer.should_stop = True

    def finish_staging(self) -> None:
        """The last moment: from here on the weights change."""
        if self._saver is not None:
            began_s = time.perf_counter()
            self._saver.finish_staging()
            self.stand_still(time.perf_counter() - began_s)

    def save_now(self, reason: str) -> None:
        """Save the step that has just ended, unless that is done or checkpoints are off.

        All ranks call it in the same step, once this callback knows that it ended. The save begins
        when training rests.
        """
        behind = [s.tier for s in self._schedules if self._step > s.last_saved_step]
        if behind:
            self._want([schedule.tier for schedule in self._schedules], reason)

    def save_soon(self, reason: str) -> bool:
        """Save the step that has just ended to the tiers that are free; to the others a later one.

        All ranks call it in the same step, and act alike: what is free is what all have reported.

        Returns:
            False if not even the nearest tier is free. Waiting for it here would hold up every
            rank for as long as its storage takes: ask again after the next step.
        """
        if not self._schedules:
            return True
        nearest = self._schedules[0]
        busy = {s.tier: s for s in self._schedules if s.tier in self._saving}
        if nearest.tier in busy:
            self._tell_awaited(nearest, reason)
            return False
        self._want([s.tier for s in self._schedules if s.tier not in busy], reason)
        for tier, schedule in busy.items():
            self._owed[tier] = f"{reason}; {tier} was not free at step {self._step}"
            if self._rank == 0:
                self._tell_postponed(schedule, self._step, schedule, reason)
        return True

    def _tell_awaited(self, nearest: TierSchedule, reason: str) -> None:
        """Rank 0: an emergency save waits for the one in flight; it asks after every step."""
        if self._rank == 0 and self._awaited_step != nearest.last_saved_step:
            self._awaited_step = nearest.last_saved_step
            self._tell_postponed(nearest, self._step, nearest, reason)

    def _settle_owed(self) -> None:
        """Save to the tiers that were not free in an emergency, now that all of them are."""
        if self._owed and not self._saving:
            self._want(tuple(self._owed), "; ".join(dict.fromkeys(self._owed.values())))

    def _want(self, tiers: Collection[Tier], reason: str) -> None:
        self._wanted |= dict.fromkeys(tiers)
        self._why[reason] = None

    def rest(self, step: int) -> None:
        """Training rests after `step`: the save that is wanted begins."""
        tiers, why = tuple(self._wanted), "; ".join(self._why)
        self._wanted, self._why = {}, {}
        if tiers:
            self._save(tiers, why)

    def end(self, step: int) -> None:
        """Training ends after `step`: what ends it early, on all ranks, asks for no save."""
        if step < self._max_steps:
            self.save_now(f"training was ended at step {step}, before step {self._max_steps}")
            self.rest(step)

    def _measure_step(self) -> None:
        """Note the time of a step, without what it stood still for."""
        now_s = time.perf_counter()
        for schedule in self._schedules:
            schedule.step_ended(
                now_s - self._boundary_s - self._stood_still_s,
                is_disturbed=self._is_disturbed or bool(self._saving),
            )
        self._boundary_s, self._stood_still_s, self._is_disturbed = now_s, 0.0, False

    def _save(self, tiers: Collection[Tier], reason: str) -> None:
        """Start a save; training stands still meanwhile. What goes further goes to the nearest."""
        began_s = time.perf_counter()
        wanted = {self._schedules[0].tier, *tiers}
        for schedule in self._schedules:
            if schedule.tier in wanted:
                schedule.save_began(self._step)
                self._owed.pop(schedule.tier, None)
        with self._progress.while_waiting():
            self._save_training(self._step, reason, wanted)
        self._is_disturbed = True
        self.stand_still(time.perf_counter() - began_s)

    def stand_still(self, seconds: float) -> None:
        """Leave `seconds` that training has just waited out of the time of its step."""
        self._stood_still_s += seconds
        self._source.exclude_from_pace(seconds)

    def _collect(self) -> None:
        """Take in saves that have ended since the last step."""
        if self._saver is None:
            return
        for outcome in self._saver.poll():
            for schedule in self._schedules:
                if schedule.tier == outcome.tier:
                    schedule.save_ended(outcome)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation_began_s = time.perf_counter()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A step with a validation in it says nothing about step times, measured or emulated.
        self._is_disturbed = True
        self.stand_still(time.perf_counter() - self._validation_began_s)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._saver is not None:
            with self._progress.while_waiting():
                self._saver.wait_for_verdicts(self._close_timeout_s)
            self._collect()
