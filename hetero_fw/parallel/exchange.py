"""What ranks tell each other once per step, in one small collective on the control group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One rank's report of one step; everything that ranks must agree on travels here.

    Attributes:
        loss: this rank's part of the global mean loss.
        squared_norm: this rank's part of the squared gradient norm.
        compute_s: time this rank's device was busy with its share.
        memory_bytes: memory the rank holds.
        stop_signal: number of the signal that asks for a stop, 0 if none.
        is_saving: tiers that the rank still writes an earlier checkpoint to, each a power of 2.
        wants_save: tiers that rank 0 decided to save to after this step, likewise.
        emergency: what asks for an emergency save after this step, 0 if nothing does: the place of
            a `Measure`, counted from 1, or the number of a signal below zero.
    """

    loss: float
    squared_norm: float
    compute_s: float
    memory_bytes: float
    stop_signal: float = 0.0
    is_saving: float = 0.0
    wants_save: float = 0.0
    emergency: float = 0.0


class Exchange:
    """All-gathers short rows of numbers among the ranks of a gloo group.

    All ranks call each method, in the same order. With `group=None` there is one rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def all_gather(self, row: Sequence[float]) -> list[list[float]]:
        """Rows of all ranks in rank order; each row has as many numbers as the others."""
        if self._group is None:
            return [list(row)]
        mine = torch.tensor(row, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(rows, mine, group=self._group)
        return [list(theirs.tolist()) for theirs in rows]

    def reports(self, report: StepReport) -> list[StepReport]:
        """Everybody's report of the same step."""
        names = [field.name for field in fields(StepReport)]
        rows = self.all_gather(astuple(report))
        return [StepReport(**dict(zip(names, row, strict=True))) for row in rows]

    def start_sum(self, count: int) -> PendingSum:
        """Begin to add `count` over all ranks while the caller computes on."""
        total = torch.tensor([count], dtype=torch.int64)
        if self._group is None:
            return PendingSum(total, None)
        work = dist.all_reduce(total, group=self._group, async_op=True)
        return PendingSum(total, work)


class PendingSum:
    """Handle of a sum under way."""

    def __init__(self, total: torch.Tensor, work: dist.Work | None) -> None:
        self._total = total
        self._work = work

    def wait(self) -> int:
        """Block until the sum is there and return it."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return int(self._total)
