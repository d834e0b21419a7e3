"""What one rank alone gathers is its own; a report survives the trip."""

from __future__ import annotations

import math
from dataclasses import fields

import torch.distributed as dist

from hetero_fw.parallel import Exchange, StepReport
from tests.distributed.ranks import run_ranks


def report(rank: int) -> StepReport:
    return StepReport(
        loss=0.1 + rank,
        squared_norm=float("nan") if rank == 1 else 1e300,
        compute_s=0.25,
        memory_bytes=2.0**52 + rank,
        stop_signal=15.0 * rank,
        wants_save=1.0,
    )


def same(left: StepReport, right: StepReport) -> bool:
    """Equal field by field, nan included."""
    pairs = [(getattr(left, f.name), getattr(right, f.name)) for f in fields(StepReport)]
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


def test_one_rank_needs_no_group() -> None:
    exchange = Exchange(None)
    assert exchange.all_gather([1.0, 2.0]) == [[1.0, 2.0]]
    assert exchange.reports(report(0)) == [report(0)]
    pending = exchange.start_sum(7)
    assert pending.wait() == 7
    assert pending.wait() == 7


def gather(rank: int, group: dist.ProcessGroup) -> tuple[list[StepReport], int, list[list[float]]]:
    exchange = Exchange(group)
    pending = exchange.start_sum(10 + rank)
    reports = exchange.reports(report(rank))
    return reports, pending.wait(), exchange.all_gather([float(rank)])


def test_ranks_learn_the_same_in_rank_order() -> None:
    for reports, total, rows in run_ranks(gather, 2):
        assert all(map(same, reports, [report(0), report(1)]))
        assert total == 21
        assert rows == [[0.0], [1.0]]
