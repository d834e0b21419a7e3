"""What watching for emergencies costs a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_fw.app import compose_checked
from hetero_fw.app.emergency import limit_rule
from hetero_fw.callbacks import EmergencySave, LimitWatch
from hetero_fw.monitoring import EventLog, HostTelemetry, TelemetryThread
from hetero_fw.parallel import StepReport
from hetero_fw.recovery import SaveRequest

pytestmark = pytest.mark.benchmark
NUM_CALLS = 5000


def cost_us(call: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    for _ in range(NUM_CALLS):
        call()
    return (time.perf_counter() - began_s) / NUM_CALLS * 1e6


def test_watching_costs_a_step_next_to_nothing(tmp_path: Path) -> None:
    watch = LimitWatch(limit_rule(compose_checked([]).callbacks.emergency_save))
    thread = TelemetryThread(
        [HostTelemetry()], interval_s=1.0, on_reading=watch.observe, on_error=print
    )
    report = StepReport(loss=0.0, squared_norm=0.0, compute_s=0.0, memory_bytes=0.0)
    source: Any = SimpleNamespace(finished_step=SimpleNamespace(reports=(report,) * 64))
    trainer: Any = SimpleNamespace(global_step=1)
    module: Any = None
    callback = EmergencySave(
        source=source,
        save_soon=lambda reason: True,
        watch=watch,
        telemetry=thread,
        signals=SaveRequest(),
        events=EventLog(tmp_path / "events.jsonl", 0, 0),
        rank=0,
    )
    callback.on_fit_start(trainer, module)

    def step() -> None:
        callback.notes()
        callback.on_train_batch_end(trainer, module, None, None, 0)

    step_us = cost_us(step)
    callback.on_fit_end(trainer, module)
    print(f"\nemergency saves, 64 ranks: {step_us:.1f} us a step (aim: under 200 us)")
    print(f"one reading of the host, in its thread: {cost_us(thread.sample):.1f} us")
