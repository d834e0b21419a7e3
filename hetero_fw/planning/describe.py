"""A plan as text: one table, the totals, the reasons."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hetero_fw.hardware import GIB, WorkloadProfile
from hetero_fw.planning.plan import ParallelPlan, RankPlan

_MAX_ROWS = 32
_HEADER = (
    "rank",
    "node",
    "device",
    "samples",
    "micro-batches",
    "compute s",
    "memory GiB",
    "budget GiB",
)
_IS_TEXT = (False, True, True, False, True, False, False, False)


def format_plan(plan: ParallelPlan, workload: WorkloadProfile | None = None) -> str:
    """The plan table, totals and reasons.

    Large plans show one row for each run of equal ranks on a node. A `workload` adds a line about
    the model.
    """
    return "\n".join(
        [*_title(plan, workload), "", *_table(plan), "", *_totals(plan), "", *_reasons(plan)]
    )


def plan_grid(plan: ParallelPlan) -> str:
    """Samples by rank (row) and micro-batch (column), for golden files."""
    width = max(len(str(size)) for rank in plan.ranks for size in rank.microbatches)
    label = len(str(plan.world_size - 1))
    return "\n".join(
        f"{rank.rank:>{label}}: " + " ".join(f"{size:>{width}}" for size in rank.microbatches)
        for rank in plan.ranks
    )


def _title(plan: ParallelPlan, workload: WorkloadProfile | None) -> Iterator[str]:
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    zero = f", ZeRO stage {plan.zero_stage}" if plan.zero_stage else ""
    split = plan.batch_split.value.replace("_", " ")
    yield (
        f"Plan: {plan.kind} on {ranks}{zero}, {plan.global_batch_size} samples a step "
        f"split {split}, precision {plan.precision}"
    )
    if plan.emulation:
        yield (
            "EMULATED: CPU processes stand in for the declared devices and compute in "
            f"{plan.compute_precision}; times are seconds of this machine "
            f"({plan.emulation.dilation:.4g} for 1 s on the declared devices)"
        )
    if workload:
        estimated = ", estimated" if workload.is_estimated else ""
        yield (
            f"Model: {workload.name}, {workload.num_params:,} parameters, "
            f"{workload.flops_per_sample:.3g} FLOP a sample{estimated}"
        )


def _table(plan: ParallelPlan) -> Iterator[str]:
    rows = [_HEADER, *(_row(run) for run in _runs(plan.ranks))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    for row in rows:
        cells = (
            cell.ljust(width) if is_text else cell.rjust(width)
            for cell, width, is_text in zip(row, widths, _IS_TEXT, strict=True)
        )
        yield "  ".join(cells).rstrip()


def _runs(ranks: Sequence[RankPlan]) -> list[list[RankPlan]]:
    """Each rank by itself, or runs of equal ranks on a node if there are many."""
    if len(ranks) <= _MAX_ROWS:
        return [[rank] for rank in ranks]
    grouped = itertools.groupby(ranks, key=lambda rank: (rank.node_index, rank.microbatches))
    return [list(run) for _, run in grouped]


def _row(run: Sequence[RankPlan]) -> tuple[str, ...]:
    first, last = run[0], run[-1]
    return (
        str(first.rank) if first is last else f"{first.rank}-{last.rank}",
        first.node,
        first.device,
        str(first.num_samples),
        _sizes(first.microbatches),
        f"{first.compute_s:.4g}",
        f"{first.required_bytes / GIB:.2f}",
        f"{first.budget_bytes / GIB:.2f}",
    )


def _sizes(microbatches: Sequence[int]) -> str:
    """Run lengths, for example `3x8 1x7`."""
    return " ".join(f"{len(list(same))}x{size}" for size, same in itertools.groupby(microbatches))


def _totals(plan: ParallelPlan) -> Iterator[str]:
    exposed = f", of which {plan.communication_s:.4g} s wait for communication"
    yield _line(
        "step time",
        f"{plan.step_s:.4g} s{exposed if plan.communication_s else ''}; "
        f"{plan.samples_per_s:.4g} samples/s",
    )
    yield _line("equal split on all", _compared(plan, plan.uniform_step_s))
    yield _line("best single type", _compared(plan, plan.best_single_type_step_s))
    if plan.emulation:
        yield _line("on declared devices", f"{plan.emulation.declared_step_s:.4g} s predicted")
    if plan.idle_devices:
        shown = ", ".join(plan.idle_devices[:8])
        more = len(plan.idle_devices) - 8
        yield _line("idle devices", f"{shown} and {more} more" if more > 0 else shown)


def _compared(plan: ParallelPlan, other_s: float | None) -> str:
    if other_s is None:
        return "not possible"
    return f"{other_s:.4g} s; this plan is {other_s / plan.step_s:.3g} x as fast"


def _line(label: str, text: str) -> str:
    return f"{label + ':':<21}{text}"


def _reasons(plan: ParallelPlan) -> Iterator[str]:
    yield "Reasons"
    for reason in plan.reasons:
        yield f"- {reason}"
