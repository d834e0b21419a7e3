"""What the configuration makes of the optimizer, and what of that has changed since a checkpoint.

A checkpoint holds the settings of each parameter group as training had left them, such as a rate
that a schedule has lowered. They are restored, so that a run that is continued as it was goes on
bit by bit. Where the configuration says something else than it said then, it wins: a rate or a
schedule as if it had been so from the first step.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hetero_fw.checkpoint import optimizer_class, to_plain

_RATES = ("lr", "initial_lr")


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What the configuration says otherwise than that of a checkpoint.

    Attributes:
        settings: by number of the parameter group and key.
        is_rescheduled: rates or schedules are among it.
        told: the same for people.
    """

    settings: tuple[tuple[int, str], ...] = ()
    is_rescheduled: bool = False
    told: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """As the optimizer and its schedules are built, before anything is restored.

    Attributes:
        classes: names of the optimizers' classes.
        groups: settings of each parameter group, without its parameters.
        schedules: types and states of the schedules.
    """

    classes: tuple[str, ...]
    groups: tuple[Mapping[str, Any], ...]
    schedules: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, trainer: pl.Trainer) -> OptimizerSettings:
        """Copies of those of `trainer`, which must be set up."""
        groups = (
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in _groups(trainer)
        )
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        schedules = (
            {"type": type(one).__qualname__, **copy.deepcopy(one.state_dict())}
            for one in schedulers
        )
        classes = tuple(map(optimizer_class, trainer.optimizers))
        return cls(classes=classes, groups=tuple(groups), schedules=tuple(schedules))

    def kept(self) -> dict[str, Any]:
        """What of them is kept with a checkpoint, where `to_plain` writes it."""
        return {
            "classes": list(self.classes),
            "groups": _simplified(self.groups),
            "schedules": _simplified(self.schedules),
        }

    def changes_since(self, saved: Mapping[str, Any]) -> Changes:
        """What differs from `saved`, what was `kept` of another attempt, as `to_plain` wrote it.

        It has as many groups, unless its optimizer is of another class: of that one nothing is
        restored.
        """
        own = to_plain(self.kept())
        before = saved.get("classes", own["classes"])  # an older release did not say
        if before != own["classes"]:
            told = (
                f"optimizer {' '.join(before)} -> {' '.join(self.classes)}, which begins with an "
                "empty state; of the checkpoint the weights alone are restored"
            )
            return Changes(is_rescheduled=True, told=(told,))
        return self._changed_settings(own, saved)

    def _changed_settings(self, own: Mapping[str, Any], saved: Mapping[str, Any]) -> Changes:
        settings, told = [], dict[str, None]()
        pairs = zip(own["groups"], saved["groups"], strict=True)
        for number, (now, before) in enumerate(pairs):
            for key in _changed(now, before):
                settings.append((number, key))
                told[f"{key} {before[key]} -> {now[key]}"] = None
        types = [[schedule["type"] for schedule in x["schedules"]] for x in (saved, own)]
        if types[0] != types[1]:
            told[f"scheduler {' '.join(types[0]) or None} -> {' '.join(types[1]) or None}"] = None
        schedules = list(zip(own["schedules"], saved["schedules"], strict=False))
        is_rescheduled = (
            types[0] != types[1]
            or any(key in _RATES for _, key in settings)
            or any(_changed(now, before) for now, before in schedules)
        )
        if is_rescheduled and types[0] == types[1]:
            told |= {
                f"scheduler.{key} {before[key]} -> {now[key]}": None
                for now, before in schedules
                for key in _changed(now, before)
                if not key.startswith("_") and key != "base_lrs"
            }
        return Changes(settings=tuple(settings), is_rescheduled=is_rescheduled, told=tuple(told))

    def apply(self, trainer: pl.Trainer, changes: Changes, num_steps: int) -> None:
        """Make `changes` to a restored optimizer, where they change rates with fresh schedules.

        Args:
            num_steps: that the schedules have advanced.
        """
        groups = _groups(trainer)
        for number, key in changes.settings:
            _set(groups[number], key, self.groups[number][key])
        if not changes.is_rescheduled:
            return
        for group, fresh in zip(groups, self.groups, strict=True):
            for key, value in fresh.items():  # a schedule may lead more than the rate
                _set(group, key, value)
        with warnings.catch_warnings():
            # It is on purpose that the optimizer takes no step between.
            warnings.simplefilter("ignore")
            for config in trainer.lr_scheduler_configs:
                if not isinstance(config.scheduler, ReduceLROnPlateau):  # that follows a metric
                    for _ in range(num_steps):
                        config.scheduler.step()


def _groups(trainer: pl.Trainer) -> list[dict[str, Any]]:
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]


def _simplified(value: Any) -> Any:
    """Only lists and Python's numbers, so that what older releases have kept compares equal."""
    if isinstance(value, list | tuple):
        return [_simplified(item) for item in value]
    if type(value) is dict:
        return {key: _simplified(item) for key, item in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    return None if callable(value) else value


def _changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Keys of both with another value; what only one release has says nothing."""
    return [key for key in now if key in before and now[key] != before[key]]


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    current = group.get(key)
    if isinstance(current, Tensor):
        current.fill_(float(value))
    else:
        group[key] = copy.deepcopy(value)
