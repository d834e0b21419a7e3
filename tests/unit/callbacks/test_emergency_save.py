"""Whoever asks, all ranks save after the same step, once."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hetero_fw.callbacks import EmergencySave, LimitWatch
from hetero_fw.monitoring import EventLog, read_events
from hetero_fw.parallel import StepReport
from hetero_fw.policies import Limit, LimitRule, Measure, Reading
from hetero_fw.recovery import SaveRequest

MEMORY = Measure.HOST_MEMORY_PERCENT
RULE = LimitRule(limits={MEMORY: Limit(above=95.0, sustained_s=2.0)}, cooldown_s=100.0)


class Telemetry:
    """Readings come from the test itself."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")


class Ranks:
    """Two ranks in one process; they meet at each step boundary."""

    def __init__(self, path: Path) -> None:
        self.now_s = 0.0
        self.step = 0
        self.saved: list[tuple[int, int, str]] = []
        self.path = path / "events.jsonl"
        self.watches = [LimitWatch(RULE, self.clock) for _ in range(2)]
        self.signals = [SaveRequest() for _ in range(2)]
        self.telemetry = Telemetry()
        self.finished_step: Any = None
        self.callbacks = [self._callback(rank) for rank in range(2)]

    def clock(self) -> float:
        return self.now_s

    def _callback(self, rank: int) -> EmergencySave:
        return EmergencySave(
            source=self,  # type: ignore[arg-type]
            save_soon=lambda reason: self._save(rank, reason),
            watch=self.watches[rank],
            telemetry=self.telemetry,
            signals=self.signals[rank],
            events=EventLog(self.path, 0, rank),
            rank=rank,
            clock=self.clock,
        )

    def _save(self, rank: int, reason: str) -> bool:
        if any(report.is_saving for report in self.finished_step.reports):
            return False
        self.saved.append((self.step, rank, reason))
        return True

    def read(self, rank: int, value: float) -> None:
        self.watches[rank].observe(Reading(values={MEMORY: value}))

    def run_step(self, *, is_saving: bool = False, seconds: float = 1.0) -> None:
        self.now_s += seconds
        self.step += 1
        reports = tuple(
            StepReport(
                loss=0.0,
                squared_norm=0.0,
                compute_s=0.0,
                memory_bytes=0.0,
                is_saving=float(is_saving),
                **callback.notes(),
            )
            for callback in self.callbacks
        )
        self.finished_step = SimpleNamespace(reports=reports)
        trainer: Any = SimpleNamespace(global_step=self.step)
        for callback in self.callbacks:
            callback.on_train_batch_end(trainer, None, None, None, 0)  # type: ignore[arg-type]


def test_nothing_is_saved_while_nothing_is_wrong(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for _ in range(5):
        ranks.read(0, 50.0)
        ranks.run_step()
    assert ranks.saved == []
    assert read_events(ranks.path) == []


def test_one_rank_asks_and_both_save_after_the_same_step_once(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for _ in range(300):
        ranks.read(0, 50.0)
        ranks.read(1, 97.0)
        ranks.run_step()
    cause = "emergency save asked for by rank 1: host_memory_percent over its limit"
    assert ranks.saved == [(2, 0, cause), (2, 1, cause)]
    (event,) = read_events(ranks.path)
    assert event["event"] == "emergency_save"
    assert (event["rank"], event["asking_rank"]) == (1, 1)
    assert event["step"] == ranks.saved[0][0]
    assert event["reason"].startswith("host_memory_percent 97 %, above 95 % for ")


def test_ranks_of_one_host_ask_together_but_save_once(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.read(0, 97.0)
    ranks.now_s = 0.5
    ranks.read(1, 97.0)
    for _ in range(300):
        ranks.run_step()
        ranks.read(0, 97.0)
        ranks.read(1, 97.0)
    assert len(ranks.saved) == 2
    assert len({step for step, _, _ in ranks.saved}) == 1


def test_a_save_under_way_is_waited_for_step_by_step(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.read(1, 97.0)
    for _ in range(4):
        ranks.run_step(is_saving=True)
    assert ranks.saved == []
    ranks.run_step()
    assert [step for step, _, _ in ranks.saved] == [5, 5]


def test_a_signal_to_every_process_is_one_request(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    before = signal.getsignal(signal.SIGUSR1)
    try:
        ranks.signals[1].listen(signal.SIGUSR1)
        ranks.run_step()
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    # The monotonic clock of the signal and that of the test are one.
    ranks.now_s = ranks.signals[1]._received_s
    ranks.run_step()
    assert [step for step, _, _ in ranks.saved] == [2, 2]
    (event,) = read_events(ranks.path)
    assert (event["asking_rank"], event["reason"]) == (1, "SIGUSR1 received")
    # The same signal reaches the other rank a moment later.
    ranks.signals[0]._note(signal.SIGUSR1, None)
    ranks.signals[0]._received_s = ranks.now_s + 1.0
    ranks.run_step()
    assert len(ranks.saved) == 2
    ranks.signals[0]._received_s = ranks.now_s + 10.0
    ranks.run_step(seconds=10.0)
    assert len(ranks.saved) == 4, "a later one counts"


def test_a_signal_begins_no_cool_down_for_readings(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.signals[0]._note(signal.SIGUSR2, None)
    ranks.run_step()
    assert [rank for _, rank, _ in ranks.saved] == [0, 1]
    for _ in range(5):
        ranks.read(1, 97.0)
        ranks.run_step()
    assert len(ranks.saved) == 4


def test_telemetry_runs_while_training_does_and_ends_with_an_exception(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    trainer: Any = None
    module: Any = None
    ranks.callbacks[0].on_fit_start(trainer, module)
    ranks.callbacks[0].on_exception(trainer, module, RuntimeError())
    assert ranks.telemetry.calls == ["start", "stop"]
    assert ranks.saved == [], "an exception asks for no save"
    ranks.callbacks[1].on_fit_end(trainer, module)
    assert ranks.telemetry.calls[-1] == "stop"
