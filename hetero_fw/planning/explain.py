"""Why a plan is as it is, in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetero_fw.planning.evaluate import Candidate, Problem
from hetero_fw.planning.plan import BatchSplit, PlanKind
from hetero_fw.planning.precision import choose_precision


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The chosen candidate and what it was compared with; times in seconds, None if unfit."""

    chosen: Candidate
    split: BatchSplit
    uniform_step_s: float | None
    all_devices_step_s: float | None
    best_single_type_step_s: float | None


def reasons(problem: Problem, decision: Decision) -> Iterator[str]:
    """One sentence for each choice."""
    chosen = decision.chosen
    devices = problem.pool.devices(chosen.counts)
    yield choose_precision(devices, problem.request.precision).reason
    yield _split_reason(problem, decision)
    if chosen.num_devices < sum(problem.pool.all_counts):
        yield _idle_reason(problem, decision)
    yield from _zero_reason(problem, chosen)
    yield _microbatch_reason(problem, chosen)
    if chosen.num_devices > 1 and not problem.has_communication:
        yield "communication: hidden by the pacing of emulated devices"


def _split_reason(problem: Problem, decision: Decision) -> str:
    if decision.chosen.num_devices == 1:
        return f"batch: all {problem.request.global_batch_size} samples on one device"
    if decision.split is BatchSplit.GIVEN:
        return "batch: split as listed in parallel.batch_split"
    if decision.split is BatchSplit.UNIFORM:
        return "batch: equal shares on all devices, as parallel.batch_split=uniform asks"
    shown = []
    for entry, members in zip(problem.pool.classes, decision.chosen.shares, strict=True):
        if members:
            low, high = min(members), max(members)
            samples = str(low) if low == high else f"{low} to {high}"
            shown.append(f"{samples} on each {entry.device.name}")
    return f"batch: {', '.join(shown)}, in proportion to speed"


def _idle_reason(problem: Problem, decision: Decision) -> str:
    if problem.request.kind == PlanKind.SINGLE:
        return "devices: the fastest one alone, as parallel.kind=single asks"
    if sum(problem.pool.all_counts) > problem.request.global_batch_size:
        return "devices: some are idle because there are more devices than samples"
    if decision.all_devices_step_s is None:
        return "devices: some are idle because the model does not fit when they take part"
    saved = 1 - decision.chosen.step_s / decision.all_devices_step_s
    return f"devices: some are idle because a step without them is {saved:.1%} shorter"


def _zero_reason(problem: Problem, chosen: Candidate) -> Iterator[str]:
    if chosen.zero_stage == 0:
        yield "ZeRO stage 0: one rank, nothing to shard"
    elif problem.request.zero_stage != "auto":
        yield f"ZeRO stage {chosen.zero_stage}: set by parallel.zero_stage"
    elif chosen.zero_stage == 2:
        yield "ZeRO stage 2: gathered parameters fit and are gathered only once a step"
    else:
        yield "ZeRO stage 3: stage 2 would not fit, or only in more and costlier micro-batches"


def _microbatch_reason(problem: Problem, chosen: Candidate) -> str:
    count = chosen.num_microbatches
    if problem.request.fixed_num_microbatches:
        return f"micro-batches: {count}, set by parallel.num_microbatches"
    if count == 1:
        return "micro-batches: 1, each share fits at once"
    limit = "memory"
    if problem.request.max_microbatch_size is not None:
        limit = "memory or parallel.max_microbatch_size"
    return f"micro-batches: {count}, as {limit} does not hold the shares at once"
