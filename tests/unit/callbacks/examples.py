"""A strategy and a trainer as callbacks see them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hetero_fw.parallel import StepReport, StepResult
from hetero_fw.planning import ParallelPlan
from tests.unit.planning.examples import plan


@dataclass(kw_only=True)
class Source:
    """Steps as a test says they were; notes what is taken out of the pace."""

    plan: ParallelPlan = field(default_factory=plan)
    finished_step: StepResult = field(default_factory=lambda: result([report()]))
    loss_scale: float | None = None
    excluded_s: list[float] = field(default_factory=list)

    def exclude_from_pace(self, seconds: float) -> None:
        self.excluded_s.append(seconds)


@dataclass(kw_only=True)
class Optimizer:
    """What is read of an optimizer."""

    param_groups: list[dict[str, Any]]


@dataclass(kw_only=True)
class Trainer:
    """What is read and set of a trainer."""

    global_step: int = 0
    should_stop: bool = False
    optimizers: list[Optimizer] = field(
        default_factory=lambda: [Optimizer(param_groups=[{"lr": 0.25}])]
    )
    callback_metrics: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class Stop:
    """A stop request that a test makes."""

    signal_number: int = 0


def report(**changes: float) -> StepReport:
    values = {"loss": 1.0, "squared_norm": 4.0, "compute_s": 0.5, "memory_bytes": 100.0}
    return StepReport(**{**values, **changes})


def result(reports: list[StepReport]) -> StepResult:
    return StepResult(
        loss=2.0, grad_norm=3.0, num_targets=640, reports=tuple(reports), stretch=1.25
    )
