"""Save when the policy says so, at a step boundary that all ranks have agreed on."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from hetero_fw.callbacks.tier_schedule import TierSchedule, from_number, to_number
from hetero_fw.checkpoint import CheckpointSaver
from hetero_fw.parallel import StepSource
from hetero_fw.policies import Tier

PROGRESS_INTERVAL_S = 10.0
_CLOSE_TIMEOUT_S = 600.0


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
        self._announce = announce
        self._saving: frozenset[Tier] = frozenset()
        self._wanted: dict[Tier, None] = {}
        self._why: dict[str, None] = {}
        self._reasons: dict[Tier, str] = {}
        self._told_s = time.perf_counter()
        self._began_s = self._boundary_s = time.perf_counter()
        self._is_disturbed = True  # the first step warms up
        self._stood_still_s = 0.0
        self._validation_began_s = 0.0
        self.was_preempted = False

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
            decision = schedule.decide(
                self._step + 1, elapsed_s, save_in_flight=schedule.tier in saving
            )
            if decision.save:
                reasons[schedule.tier] = decision.reason
        if reasons and self._schedules[0].tier in saving and self._step + 1 < self._max_steps:
            return {}  # what goes further goes through the nearest tier
        return reasons

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
        self._collect()
        self._tell_progress()
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

    def _want(self, tiers: Collection[Tier], reason: str) -> None:
        self._wanted |= dict.fromkeys(tiers)
        self._why[reason] = None

    def rest(self, step: int) -> None:
        """Training rests after `step`: the save that is wanted begins."""
        tiers, why = tuple(self._wanted), "; ".join(self._why)
        self._wanted, self._why = {}, {}
        if tiers:
            self._save(tiers, why)

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

    def _tell_progress(self) -> None:
        """Rank 0: say every few seconds how far a long save is."""
        progress = self._saver.progress() if self._saver is not None and self._rank == 0 else None
        now_s = time.perf_counter()
        if progress is None:
            self._told_s = now_s
        elif now_s - self._told_s >= PROGRESS_INTERVAL_S:
            self._told_s = now_s
            share = progress.num_bytes / max(1, progress.size_bytes)
            self._announce(
                f"checkpoint of step {progress.step} to {progress.tier}: {share:.0%} of rank 0's "
                f"{progress.size_bytes / 1e9:.3g} GB written after {progress.taken_s:.0f} s"
            )

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
            self._saver.wait(_CLOSE_TIMEOUT_S)
            self._collect()
