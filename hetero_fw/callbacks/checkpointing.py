"""Save when the policy says so, at a step boundary that all ranks have agreed on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer
from typing_extensions import override

from hetero_fw.callbacks.run_history import RunHistoryFacts
from hetero_fw.callbacks.save_cost import SaveCostMeter
from hetero_fw.checkpoint import CheckpointSaver
from hetero_fw.monitoring import EventLog
from hetero_fw.parallel import StepSource
from hetero_fw.policies import (
    IntervalObservation,
    IntervalRule,
    SaveDecision,
    SaveObservation,
    decide_interval,
    decide_save,
)

_CLOSE_TIMEOUT_S = 600.0


class StopSource(Protocol):
    """Whatever notes that a stop was asked for."""

    signal_number: int


class AdaptiveCheckpoint(Callback):
    """Asks the policy once a step on rank 0; the answer reaches all ranks with the step's report.

    Args:
        source: the strategy.
        saver: None: checkpoints are off, stop requests are still obeyed.
        save: hands the training as it stands to `saver`, for a step and a reason.
        first_step: the step training starts from.
        max_steps: the step it ends with.
    """

    def __init__(  # noqa: PLR0913  # facts of the run, none of which has a default
        self,
        *,
        source: StepSource,
        saver: CheckpointSaver | None,
        rule: IntervalRule,
        history: RunHistoryFacts,
        save: Callable[[int, str], None],
        stop: StopSource,
        events: EventLog,
        first_step: int,
        max_steps: int,
        rank: int,
    ) -> None:
        self._source = source
        self._saver = saver
        self._rule = rule
        self._history = history
        self._save_training = save
        self._stop = stop
        self._events = events
        self._step = first_step
        self._max_steps = max_steps
        self._rank = rank
        self._last_saved_step = first_step
        self._num_saves = 0
        self._any_saving = False
        self._decision = SaveDecision(save=False, reason="")
        self._meter = SaveCostMeter(history)
        self._began_s = self._boundary_s = time.perf_counter()
        self._is_disturbed = True  # the first step warms up
        self._stood_still_s = 0.0
        self._validation_began_s = 0.0
        self.was_preempted = False

    def notes(self) -> dict[str, float]:
        """This rank's part of the step report: stop, busy, and on rank 0 whether to save."""
        is_saving = self._saver is not None and self._saver.is_busy()
        if self._rank == 0 and self._saver is not None:
            self._decision = self._decide(save_in_flight=is_saving or self._any_saving)
        return {
            "stop_signal": float(self._stop.signal_number),
            "is_saving": float(is_saving),
            "wants_save": float(self._decision.save),
        }

    def _decide(self, *, save_in_flight: bool) -> SaveDecision:
        observed = IntervalObservation(
            mtbf=self._history.rates.estimate(time.perf_counter() - self._began_s),
            step_times_s=self._meter.step_times_s,
            save_costs_s=self._meter.save_costs_s,
            persist_times_s=self._meter.persist_times_s,
            num_saves_started=self._num_saves,
        )
        return decide_save(
            SaveObservation(
                step=self._step + 1,
                last_saved_step=self._last_saved_step,
                interval=decide_interval(self._rule, observed),
                is_final=self._step + 1 >= self._max_steps,
                save_in_flight=save_in_flight and self._step + 1 < self._max_steps,
            )
        )

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
        self._any_saving = any(report.is_saving for report in reports)
        signal_number = int(max(report.stop_signal for report in reports))
        if reports[0].wants_save or signal_number:
            reason = f"stop by signal {signal_number}" if signal_number else self._decision.reason
            self.save_now(reason)
        self._collect()
        if signal_number and self._step < self._max_steps:
            self.was_preempted = True
            trainer.should_stop = True

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        # The last moment: from here on the weights change.
        if self._saver is not None:
            began_s = time.perf_counter()
            self._saver.finish_staging()
            waited_s = time.perf_counter() - began_s
            self._stood_still_s += waited_s
            self._source.exclude_from_pace(waited_s)

    def save_now(self, reason: str) -> None:
        """Save the step that has just ended, unless that is done or checkpoints are off.

        All ranks call it at the same step boundary, once this callback knows that the step ended.
        """
        if self._saver is not None and self._step > self._last_saved_step:
            self._source.exclude_from_pace(self._save(reason))

    def _measure_step(self) -> None:
        """Note the time of a step, without what it stood still for."""
        now_s = time.perf_counter()
        self._meter.step_ended(
            now_s - self._boundary_s - self._stood_still_s,
            is_disturbed=self._is_disturbed or self._any_saving,
        )
        self._boundary_s, self._stood_still_s, self._is_disturbed = now_s, 0.0, False

    def _save(self, reason: str) -> float:
        """Start a save; returns the seconds that training stood still."""
        began_s = time.perf_counter()
        self._meter.save_began()
        self._save_training(self._step, reason)
        self._last_saved_step = self._step
        self._num_saves += 1
        self._is_disturbed = True
        stall_s = time.perf_counter() - began_s
        self._stood_still_s += stall_s
        return stall_s

    def _collect(self) -> None:
        """Take in saves that have ended since the last step."""
        if self._saver is None:
            return
        for outcome in self._saver.poll():
            self._meter.save_ended(outcome.stall_s, outcome.persist_s, is_committed=outcome.ok)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation_began_s = time.perf_counter()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A step with a validation in it says nothing about step times, measured or emulated.
        self._is_disturbed = True
        taken_s = time.perf_counter() - self._validation_began_s
        self._stood_still_s += taken_s
        self._source.exclude_from_pace(taken_s)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._saver is not None:
            self._saver.wait(_CLOSE_TIMEOUT_S)
            self._collect()
