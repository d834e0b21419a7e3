"""Rank 0 asks the policy; what all ranks were told is what happens."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_fw.callbacks import AdaptiveCheckpoint, TierSchedule, read_facts
from hetero_fw.callbacks.tier_schedule import to_number
from hetero_fw.checkpoint import CheckpointSaver, DirectoryPlace, SavePoint, claim_attempt
from hetero_fw.monitoring import EventLog, read_events
from hetero_fw.policies import IntervalPolicy, IntervalRule, Tier
from tests.unit.callbacks.examples import Source, Stop, Trainer, report, result

MAX_STEPS = 10
STORAGE = to_number([Tier.STORAGE])
LOCAL = to_number([Tier.LOCAL])
ONE_TIER = {Tier.STORAGE: 4}


@dataclass(kw_only=True)
class Training:
    """Steps of one rank with a real saver; `others` is what another rank reports."""

    callback: AdaptiveCheckpoint
    source: Source
    stop: Stop
    saver: CheckpointSaver | None
    saves: list[tuple[int, str]]
    tiers: list[frozenset[Tier]]
    log: EventLog
    told: list[str]
    gate: threading.Event
    broken: threading.Event
    trainer: Any = field(default_factory=Trainer)
    emergency: str = ""
    answers: list[bool] = field(default_factory=list)

    def step(self, *, waits: bool = True, **others: float) -> None:
        notes = self.callback.notes()
        self.source.finished_step = result([report(**notes), report(**others)])
        self.trainer.global_step += 1
        module: Any = None
        self.callback.on_train_batch_end(self.trainer, module, None, None, 0)
        if self.emergency:
            self.answers.append(self.callback.save_soon(self.emergency))
        self.callback.rest(self.trainer.global_step)
        if self.saver is not None and waits:
            assert self.saver.wait(30.0)

    @property
    def saved_steps(self) -> list[int]:
        return [step for step, _ in self.saves]

    @property
    def postponed(self) -> list[tuple[int, str, str, int]]:
        """Step and tier, tier and step of what was in flight; nothing else is in the log."""
        events = read_events(self.log.path)
        assert {event["event"] for event in events} <= {"checkpoint_postponed"}
        return [
            (event["step"], event["tier"], event["in_flight_tier"], event["in_flight_step"])
            for event in events
        ]


class Fixture:
    """Makes trainings in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def training(
        self,
        *,
        policy: IntervalPolicy = IntervalPolicy.FIXED,
        first_step: int = 0,
        stored_step: int | None = None,
        rank: int = 0,
        intervals: Mapping[Tier, int] = ONE_TIER,
        close_timeout_s: float = 30.0,
        is_async: bool = True,
    ) -> Training:
        source, stop = Source(), Stop()
        log = EventLog(self._folder / "events.jsonl", 0, rank)
        all_tiers: list[frozenset[Tier]] = []
        saves: list[tuple[int, str]] = []
        told: list[str] = []
        gate = threading.Event()
        gate.set()
        broken = threading.Event()
        saver = self._saver(gate, broken, is_async) if policy is not IntervalPolicy.NONE else None

        def save(step: int, reason: str, tiers: Collection[Tier]) -> None:
            assert saver is not None
            saves.append((step, reason))
            all_tiers.append(frozenset(tiers))
            if Tier.STORAGE not in tiers:
                return  # the one tier that is there in truth
            tensors = {"weight": torch.full((3,), float(step))}
            saver.save(step, tensors, {}, reason=reason, tiers=tiers)

        rules = {
            tier: IntervalRule(policy=policy, interval_steps=interval_steps, first_save_step=2)
            for tier, interval_steps in intervals.items()
        }
        callback = AdaptiveCheckpoint(
            source=source,
            saver=saver,
            schedules=[
                TierSchedule(
                    tier,
                    rule,
                    read_facts([], source.plan, rule.prior_mtbf_s),
                    first_step=first_step if stored_step is None else stored_step,
                    max_steps=MAX_STEPS,
                )
                for tier, rule in rules.items()
            ],
            save=save,
            stop=stop,
            first_step=first_step,
            max_steps=MAX_STEPS,
            rank=rank,
            events=log,
            close_timeout_s=close_timeout_s,
            announce=told.append,
        )
        trainer = Trainer(global_step=first_step)
        return Training(
            callback=callback,
            source=source,
            stop=stop,
            saver=saver,
            saves=saves,
            tiers=all_tiers,
            log=log,
            told=told,
            gate=gate,
            broken=broken,
            trainer=trainer,
        )

    def _saver(
        self, gate: threading.Event, broken: threading.Event, is_async: bool
    ) -> CheckpointSaver:
        def on_point(point: SavePoint) -> None:
            if broken.is_set():
                raise OSError(errno.ENOSPC, "No space left on device")
            if point is SavePoint.SHARD_WRITTEN:
                assert gate.wait(30.0)

        return CheckpointSaver(
            place=DirectoryPlace(directories=claim_attempt(self._folder / "checkpoints", 0)),
            attempt=0,
            prefix="hetero_ckpt",
            rank=0,
            world_size=1,
            store=None,
            process_group=None,
            is_async=is_async,
            plan_fingerprint="0",
            on_event=lambda name, step, fields: None,
            on_point=on_point,
        )


@pytest.fixture
def made(tmp_path: Path) -> Fixture:
    return Fixture(tmp_path)


def test_saves_at_the_interval_and_at_the_end(made: Fixture) -> None:
    training = made.training()
    for _ in range(MAX_STEPS):
        training.step()
    assert training.saved_steps == [4, 8, 10]
    assert "every 4 steps" in training.saves[0][1]
    assert "final step 10" in training.saves[-1][1]
    assert not training.trainer.should_stop
    assert len(training.source.excluded_s) == 3


def test_first_adaptive_save_comes_early(made: Fixture) -> None:
    training = made.training(policy=IntervalPolicy.ADAPTIVE)
    for _ in range(3):
        training.step()
    assert training.saved_steps == [2]


def test_interval_counts_from_the_step_that_was_restored(made: Fixture) -> None:
    training = made.training(first_step=6)
    for _ in range(4):
        training.step()
    assert training.saved_steps == [10]


@pytest.mark.parametrize(
    ("restored", "stored", "saved"),
    [(MAX_STEPS, 8, [MAX_STEPS]), (MAX_STEPS, MAX_STEPS, []), (8, 4, [])],
    ids=["the storage lags", "it has it", "steps follow"],
)
def test_a_last_step_that_was_restored_is_brought_to_a_tier_that_lags(
    made: Fixture, restored: int, stored: int, saved: list[int]
) -> None:
    training = made.training(first_step=restored, stored_step=stored)
    module: Any = None
    training.callback.on_fit_start(training.trainer, module)
    training.callback.on_fit_end(training.trainer, module)
    assert training.saved_steps == saved


def test_other_ranks_do_as_rank_0_was_heard(made: Fixture) -> None:
    training = made.training(rank=1)
    training.step()
    assert training.callback.notes()["wants_save"] == 0.0
    training.source.finished_step = result([report(wants_save=STORAGE), report()])
    training.trainer.global_step += 1
    module: Any = None
    training.callback.on_train_batch_end(training.trainer, module, None, None, 0)
    assert training.saved_steps == []  # not before training rests
    training.callback.rest(2)
    assert training.saved_steps == [2]


def test_postponed_while_another_rank_is_still_saving(made: Fixture) -> None:
    training = made.training()
    for _ in range(3):
        training.step(is_saving=STORAGE)
    training.step(is_saving=STORAGE)
    assert training.saved_steps == []
    training.step()
    # What the other rank said last is known only now.
    training.step()
    assert training.saved_steps == [6]


def test_final_save_waits_for_nobody(made: Fixture) -> None:
    training = made.training()
    for _ in range(MAX_STEPS):
        training.step(is_saving=STORAGE)
    assert training.saved_steps == [MAX_STEPS]


def test_stop_on_any_rank_saves_and_ends_training(made: Fixture) -> None:
    training = made.training()
    training.step()
    training.step(stop_signal=15.0)
    assert training.saves == [(2, "stop by signal 15")]
    assert training.trainer.should_stop
    assert training.callback.was_preempted


def test_own_stop_is_reported(made: Fixture) -> None:
    training = made.training()
    training.stop.signal_number = 10
    assert training.callback.notes()["stop_signal"] == 10.0


def test_stop_at_the_last_step_is_no_stop(made: Fixture) -> None:
    training = made.training(first_step=MAX_STEPS - 1)
    training.step(stop_signal=15.0)
    assert training.saved_steps == [MAX_STEPS]
    assert not training.callback.was_preempted


@pytest.mark.parametrize(
    ("num_steps", "saved"), [(3, [3]), (4, [4]), (MAX_STEPS, [4, 8, MAX_STEPS])]
)
def test_training_that_is_ended_early_saves_its_last_step(
    made: Fixture, num_steps: int, saved: list[int]
) -> None:
    training = made.training()
    for _ in range(num_steps):
        training.step()
    training.callback.end(num_steps)
    assert training.saved_steps == saved
    assert not training.callback.was_preempted


def test_without_checkpoints_a_stop_is_still_obeyed(made: Fixture) -> None:
    training = made.training(policy=IntervalPolicy.NONE)
    training.step(stop_signal=15.0)
    assert training.saves == []
    assert training.trainer.should_stop


def test_end_of_training_waits_for_the_last_save(made: Fixture) -> None:
    training = made.training(first_step=MAX_STEPS - 1)
    training.step()
    module: Any = None
    training.callback.on_fit_end(training.trainer, module)
    assert training.saver is not None
    assert not training.saver.is_busy()


def test_a_long_save_shows_progress_and_holds_back_the_next(
    made: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero_fw.callbacks.save_progress.PROGRESS_INTERVAL_S", 0.0)
    training = made.training()
    training.gate.clear()
    for _ in range(9):
        training.step(waits=False)
    assert training.saved_steps == [4]
    assert training.told
    assert training.told[-1].startswith("checkpoint of step 4 to storage: 0% of rank 0's")
    training.gate.set()
    assert training.saver is not None
    assert training.saver.wait(30.0)
    training.step()
    assert training.saved_steps == [4, MAX_STEPS]


def test_a_save_that_waited_for_another_says_so(made: Fixture) -> None:
    training = made.training()
    for _ in range(4):
        training.step(is_saving=STORAGE)
    training.step(is_saving=STORAGE)
    training.step()
    training.step()
    assert training.saved_steps == [7]
    assert "postponed 3 steps by the save before" in training.saves[0][1]


def test_a_save_that_has_to_wait_is_logged_once_with_what_it_waits_for(made: Fixture) -> None:
    training = made.training()
    training.gate.clear()
    for _ in range(9):
        training.step(waits=False)
    training.gate.set()
    assert training.saved_steps == [4]
    assert training.postponed == [(8, "storage", "storage", 4)]


def test_only_rank_0_logs_what_is_postponed(made: Fixture) -> None:
    training = made.training(rank=1)
    training.emergency = "too hot"
    for _ in range(5):
        training.step(is_saving=STORAGE)
    assert training.answers == [False] * 5
    assert training.postponed == []


def test_each_of_two_tiers_logs_what_its_saves_wait_for(made: Fixture) -> None:
    training = made.training(intervals={Tier.LOCAL: 2, Tier.STORAGE: 5})
    for busy in (0.0, 0.0, 0.0, LOCAL, LOCAL, 0.0, 0.0):
        training.step(is_saving=busy)
    # Rank 0 knows after step 4 that another rank was saving during it. At step 5 the storage is
    # due, and what goes there goes through the nearest tier.
    assert training.postponed == [(5, "storage", "local", 4), (6, "local", "local", 4)]
    assert training.saved_steps == [2, 4, 7]
    assert training.tiers[-1] == {Tier.LOCAL, Tier.STORAGE}
    assert "postponed 2 steps by the save before" in training.saves[-1][1]


def test_an_upload_under_way_postpones_the_next_one_alone(made: Fixture) -> None:
    training = made.training(intervals={Tier.LOCAL: 2, Tier.STORAGE: 3})
    for busy in (0.0, 0.0, 0.0, STORAGE, STORAGE, STORAGE, STORAGE, 0.0, 0.0):
        training.step(is_saving=busy)
    assert training.postponed == [(6, "storage", "storage", 3)]
    assert training.saved_steps == [2, 3, 5, 7, 9]
    assert [len(tiers) for tiers in training.tiers] == [1, 2, 1, 1, 2]


def test_an_emergency_saves_where_it_can_at_once_and_elsewhere_as_soon_as_it_can(
    made: Fixture,
) -> None:
    training = made.training(intervals={Tier.LOCAL: 9, Tier.STORAGE: 9})
    training.step(is_saving=STORAGE)
    training.emergency = "too hot"
    training.step(is_saving=STORAGE)
    training.emergency = ""
    training.step(is_saving=STORAGE)
    assert training.answers == [True]
    assert training.saves == [(2, "too hot")]
    assert training.tiers == [{Tier.LOCAL}]
    assert training.postponed == [(2, "storage", "storage", 0)]
    for busy in (LOCAL, 0.0, 0.0):
        training.step(is_saving=busy)
    assert training.saves[1:] == [(5, "too hot; storage was not free at step 2")]
    assert training.tiers[1] == {Tier.LOCAL, Tier.STORAGE}


def test_an_emergency_asks_again_while_the_nearest_tier_is_not_free(made: Fixture) -> None:
    training = made.training(intervals={Tier.LOCAL: 9, Tier.STORAGE: 9})
    training.emergency = "too hot"
    for busy in (LOCAL, LOCAL, LOCAL, 0.0):
        training.step(is_saving=busy)
    assert training.answers == [False, False, False, True]
    assert training.saved_steps == [4]
    assert training.tiers == [{Tier.LOCAL, Tier.STORAGE}]
    assert training.postponed == [(1, "local", "local", 0)]


def test_progress_is_shown_while_training_waits_for_the_last_save(
    made: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero_fw.callbacks.save_progress.PROGRESS_INTERVAL_S", 0.01)
    training = made.training(first_step=MAX_STEPS - 1)
    training.gate.clear()
    training.step(waits=False)
    training.told.clear()
    threading.Timer(0.3, training.gate.set).start()
    module: Any = None
    training.callback.on_fit_end(training.trainer, module)
    assert training.told
    assert training.told[0].startswith("checkpoint of step 10 to storage: ")


@pytest.mark.parametrize("is_async", [True, False])
def test_progress_is_shown_while_training_stands_still_for_a_save(
    made: Fixture, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    monkeypatch.setattr("hetero_fw.callbacks.save_progress.PROGRESS_INTERVAL_S", 0.01)
    training = made.training(is_async=is_async)
    for _ in range(3):
        training.step(waits=False)
    training.gate.clear()
    timer = threading.Timer(0.3, training.gate.set)
    if not is_async:
        timer.start()
    training.step(waits=False)
    if is_async:
        training.told.clear()
        timer.start()
        # It waits for the memory that the save before still needs.
        training.step(waits=False, stop_signal=15.0)
    assert len(training.told) > 2, "a step itself says it once"
    assert training.told[0].startswith("checkpoint of step 4 to storage: ")


def test_the_wait_at_the_end_is_as_long_as_it_was_told(made: Fixture) -> None:
    training = made.training(first_step=MAX_STEPS - 1, close_timeout_s=0.05)
    training.gate.clear()
    training.step(waits=False)
    began_s = time.monotonic()
    module: Any = None
    training.callback.on_fit_end(training.trainer, module)
    assert time.monotonic() - began_s < 10.0
    assert training.saver is not None
    assert training.saver.is_busy()
    training.gate.set()


def test_a_failed_save_is_tried_again_before_the_interval_is_over(made: Fixture) -> None:
    training = made.training()
    training.broken.set()
    for _ in range(4):
        training.step()
    assert training.saved_steps == [4]
    training.broken.clear()
    for _ in range(3):
        training.step()
    # The failure is known at step 5.
    assert training.saved_steps == [4, 6]
    assert "the save of step 4 has failed" in training.saves[1][1]
    training.step()
    training.step()
    assert training.saved_steps == [4, 6]
    training.step()
    assert training.saved_steps == [4, 6, MAX_STEPS]
