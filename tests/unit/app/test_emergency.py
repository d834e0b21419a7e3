"""The section `callbacks`: emergency saves are declared, other entries are the user's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetero_fw.app import compose_checked
from hetero_fw.app.build import build_callbacks
from hetero_fw.app.check import check_section
from hetero_fw.app.defaults import defaults_of
from hetero_fw.app.emergency import WatchedRank, _sources, limit_rule
from hetero_fw.app.schema import Callbacks, EmergencySaves
from hetero_fw.app.signals import save_signals, stop_signals
from hetero_fw.errors import ConfigError
from hetero_fw.policies import Limit, Measure

TIMER = "+callbacks.timer={_target_:lightning.pytorch.callbacks.Timer}"


def source(target: str) -> str:
    return f"callbacks.emergency_save.source={{_target_:{target}}}"


class Sensor:
    """Says in its source that it takes nothing."""

    def __init__(self, name: str = "") -> None:
        self.name = name


def test_a_source_that_is_none_is_one_line() -> None:
    rank = WatchedRank(rank=0, local_rank=0, device=torch.device("cpu"))
    for target, told in {
        "builtins.dict": "must have the methods read and close; builtins.dict made a dict",
        "collections.deque": r"source \(collections.deque\): TypeError: .*keyword",
    }.items():
        with pytest.raises(ConfigError, match=told):
            _sources(compose_checked([source(target)]).callbacks.emergency_save, rank)
    with pytest.raises(ConfigError, match=r"must take the arguments rank and device; .* name\."):
        compose_checked([source(f"{__name__}.Sensor")])
    hot = compose_checked([source("tests.recovery.telemetry_source.HotRank")])
    assert len(_sources(hot.callbacks.emergency_save, rank)) == 1


def problems(values: dict[str, Any]) -> list[str]:
    return [str(problem) for problem in check_section(values, Callbacks, "callbacks")]


def test_every_measure_has_a_key() -> None:
    assert {measure.value for measure in Measure} <= set(defaults_of(EmergencySaves))


def test_defaults_watch_what_is_trouble_and_not_what_is_work() -> None:
    rule = limit_rule(compose_checked([]).callbacks.emergency_save)
    assert rule.limits[Measure.HOST_MEMORY_PERCENT] == Limit(
        above=95.0, sustained_s=10.0, rearm_below=90.0
    )
    assert Measure.DEVICE_UTILIZATION_PERCENT not in rule.limits
    assert Measure.HOST_SWAP_PERCENT not in rule.limits
    assert len(rule.limits) == len(Measure) - 2
    assert rule.cooldown_s == 600.0


def test_a_limit_is_completed_and_can_be_left_out() -> None:
    cfg = compose_checked(
        [
            "callbacks.emergency_save.device_utilization_percent.above=95",
            "callbacks.emergency_save.host_memory_percent=null",
        ]
    )
    limits = limit_rule(cfg.callbacks.emergency_save).limits
    assert limits[Measure.DEVICE_UTILIZATION_PERCENT] == Limit(above=95, sustained_s=10.0)
    assert Measure.HOST_MEMORY_PERCENT not in limits


def test_other_callbacks_stand_beside_it() -> None:
    cfg = compose_checked([TIMER])
    assert [type(callback).__name__ for callback in build_callbacks(cfg)] == ["Timer"]
    assert cfg.callbacks.emergency_save.interval_s == 1.0
    assert build_callbacks(compose_checked(["callbacks=none"])) == []


def test_it_can_be_turned_off_and_its_keys_may_still_be_set() -> None:
    assert compose_checked(["callbacks=none"]).callbacks.emergency_save is None
    assert compose_checked(["callbacks.emergency_save=null"]).callbacks.emergency_save is None
    cfg = compose_checked(["callbacks=none", "callbacks.emergency_save.cooldown_s=3"])
    assert cfg.callbacks.emergency_save.cooldown_s == 3
    assert cfg.callbacks.emergency_save.host_memory_percent.above == 95.0


def test_entries_that_are_neither_are_refused() -> None:
    (text,) = problems({"timer": {"interval": "step"}})
    assert text.startswith("callbacks.timer: needs a _target_")
    (text,) = problems({"timer": 3})
    assert "a section with a _target_ or null" in text
    (text,) = problems({"emergency_save": {"host_memory": None}})
    assert "Did you mean 'callbacks.emergency_save.host_memory_percent'?" in text


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["callbacks.emergency_save.host_memory_percent.rearm_below=99"], "above=95"),
        (["callbacks.emergency_save.save_signals=[SIGTERM]"], "SIGUSR1, SIGUSR2"),
        (["ckpt=none", "callbacks.emergency_save.save_signals=[SIGUSR1]"], "ckpt=none"),
        (["callbacks.emergency_save.source={_target_:hetero_fw.errors.Nope}"], "no 'Nope'"),
        (["recovery.signals=[SIGKILL]"], "SIGTERM, SIGUSR1, SIGUSR2"),
        (["recovery.grace_s=0"], "> 0"),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        compose_checked(overrides)


def test_a_signal_that_saves_does_not_stop() -> None:
    cfg = compose_checked([])
    assert stop_signals(cfg) == ("SIGTERM", "SIGUSR1", "SIGUSR2")
    assert save_signals(cfg) == ()
    cfg = compose_checked(["callbacks.emergency_save.save_signals=[SIGUSR1]"])
    assert stop_signals(cfg) == ("SIGTERM", "SIGUSR2")
    assert save_signals(cfg) == ("SIGUSR1",)
    assert save_signals(compose_checked(["callbacks=none"])) == ()
