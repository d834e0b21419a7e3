from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hetero_fw.callbacks import RestoreWatch
from hetero_fw.errors import CheckpointError
from hetero_fw.parallel import Exchange
from tests.unit.callbacks.examples import Source, Trainer, report, result


def watch(recorded: list[int], *, loss: float, rank: int = 0, earlier: tuple[int, ...] = ()) -> Any:
    source = Source(finished_step=replace(result([report()]), loss=loss))
    return RestoreWatch(
        source=source,
        exchange=Exchange(None),
        rank=rank,
        restored_step=100,
        attempt=3,
        earlier_attempts=earlier,
        record=recorded.append,
    )


def end_step(callback: Any, step: int) -> None:
    callback.on_train_batch_end(Trainer(global_step=step), None, None, None, step - 1)


def test_it_records_and_ends_the_attempt() -> None:
    recorded: list[int] = []
    with pytest.raises(CheckpointError, match="loss of step 102 is nan"):
        end_step(watch(recorded, loss=math.nan), 102)
    assert recorded == [102]


def test_rank_0_alone_records_and_all_end() -> None:
    recorded: list[int] = []
    with pytest.raises(CheckpointError, match="quarantined"):
        end_step(watch(recorded, loss=math.nan, rank=1, earlier=(2,)), 102)
    assert not recorded


def test_finite_losses_and_later_steps_go_on() -> None:
    recorded: list[int] = []
    end_step(watch(recorded, loss=2.0), 101)
    end_step(watch(recorded, loss=math.nan), 106)
    assert not recorded
