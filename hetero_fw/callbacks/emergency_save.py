"""Save before it is too late: when a device or its host nears its end, or a signal asks for it.

Any rank may ask; the question travels with the report of the step, so that all ranks save at the
same step boundary and training goes on. For a rank that raises an exception see `just_in_time`: it
must enter no collective.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from hetero_fw.monitoring import EventLog, EventName
from hetero_fw.parallel import StepReport, StepSource
from hetero_fw.policies import (
    EmergencyDecision,
    LimitRule,
    LimitState,
    Measure,
    Reading,
    after_emergency_save,
    decide_emergency_save,
    observe_reading,
)

_MEASURES = tuple(Measure)
# A batch system signals every process of a job: what comes this soon after a save is the same
# request.
_SAME_REQUEST_S = 5.0


class SignalSource(Protocol):
    """Whatever notes that a save was asked for."""

    def pending(self, since_s: float = ...) -> int:
        """Number of the signal that came after `since_s` (monotonic clock), 0 if none did."""

    def clear(self) -> None:
        """The request is answered."""


class Telemetry(Protocol):
    """What takes readings beside training; see `TelemetryThread`."""

    def start(self) -> None:
        """Begin."""

    def stop(self) -> None:
        """End; harmless when called twice or before `start`."""


class LimitWatch:
    """The policy with its memory, shared by the thread that reads and the one that trains."""

    def __init__(self, rule: LimitRule, clock: Callable[[], float] = time.monotonic) -> None:
        self._rule = rule
        self._clock = clock
        self._state = LimitState()
        self._lock = threading.Lock()

    def observe(self, reading: Reading) -> None:
        """Take in a reading; any thread."""
        with self._lock:
            self._state = observe_reading(self._rule, self._state, reading, self._clock())

    def decide(self) -> EmergencyDecision:
        """Whether a save is due now."""
        with self._lock:
            return decide_emergency_save(self._rule, self._state, self._clock())

    def conclude(self) -> None:
        """A save was made for a reading, of this or of another rank."""
        with self._lock:
            self._state = after_emergency_save(self._state, self._clock())


@dataclass(frozen=True, kw_only=True)
class _Ask:
    """What this rank asks for: a code for its report and words for the event."""

    code: float = 0.0
    reason: str = ""


class EmergencySave(Callback):
    """Asks for a save once readings or a signal call for one; comes after `AdaptiveCheckpoint`.

    Args:
        source: the strategy.
        save_soon: saves the step that has just ended, for a reason; False, on all ranks alike, if
            it cannot yet.
        watch: the limits; `telemetry` feeds it.
        signals: requests from outside. `clock` is the one they are noted by.
    """

    def __init__(
        self,
        *,
        source: StepSource,
        save_soon: Callable[[str], bool],
        watch: LimitWatch,
        telemetry: Telemetry,
        signals: SignalSource,
        events: EventLog,
        rank: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._save_soon = save_soon
        self._watch = watch
        self._telemetry = telemetry
        self._signals = signals
        self._events = events
        self._rank = rank
        self._clock = clock
        self._signals_count_from_s = float("-inf")
        self._asked = _Ask()

    def notes(self) -> dict[str, float]:
        """This rank's part of the step report: what asks for a save, if anything does."""
        self._asked = self._ask()
        return {"emergency": self._asked.code}

    def _ask(self) -> _Ask:
        number = self._signals.pending(self._signals_count_from_s)
        if number:
            return _Ask(code=-float(number), reason=f"{signal.Signals(number).name} received")
        decision = self._watch.decide()
        if decision.measure is None:
            return _Ask()
        code = 1.0 + _MEASURES.index(decision.measure)
        return _Ask(code=code, reason=decision.reason)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._telemetry.start()

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        reports = self._source.finished_step.reports
        if any(report.emergency for report in reports):
            self._save(reports, trainer.global_step)

    def _save(self, reports: tuple[StepReport, ...], step: int) -> None:
        rank = next(index for index, report in enumerate(reports) if report.emergency)
        # What cannot be saved yet is asked for again after the next step.
        if not self._save_soon(f"emergency save asked for by rank {rank}: {_cause(reports[rank])}"):
            return
        if any(report.emergency > 0 for report in reports):
            self._watch.conclude()
        if any(report.emergency < 0 for report in reports):
            self._signals.clear()
            self._signals_count_from_s = self._clock() + _SAME_REQUEST_S
        if rank == self._rank:
            self._events.write(
                EventName.EMERGENCY_SAVE, step, asking_rank=rank, reason=self._asked.reason
            )

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._telemetry.stop()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._telemetry.stop()


def _cause(report: StepReport) -> str:
    """What a report's code stands for; the figures are in the event of the rank that asked."""
    code = int(report.emergency)
    return signal.Signals(-code).name if code < 0 else f"{_MEASURES[code - 1].value} over its limit"
