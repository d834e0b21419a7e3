"""One finished step, and who can be asked about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hetero_fw.parallel.exchange import StepReport
from hetero_fw.planning import ParallelPlan


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One finished step as all ranks saw it.

    Attributes:
        loss: mean over all loss terms of the global batch.
        grad_norm: global norm before clipping.
        reports: of all ranks, in rank order.
        stretch: how much slower than planned emulated devices ran; None without emulation.
    """

    loss: float
    grad_norm: float
    num_targets: int
    reports: tuple[StepReport, ...]
    stretch: float | None


class StepSource(Protocol):
    """A strategy as callbacks see it. Asked at step boundaries, on every rank alike."""

    plan: ParallelPlan

    @property
    def finished_step(self) -> StepResult:
        """The newest step."""

    @property
    def loss_scale(self) -> float | None:
        """Factor on the loss in the newest step, None where there is no scaling."""

    def exclude_from_pace(self, seconds: float) -> None:
        """Take time out of an emulated step in which its device would have stood still."""
