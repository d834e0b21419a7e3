"""The predicted step of one way to train: which devices, which shares, how many micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from hetero_fw.hardware import DeviceSpec, Precision
from hetero_fw.planning.cost import (
    Sharding,
    StepWork,
    budget_bytes,
    busy_seconds,
    exposed_seconds,
    sample_bytes,
    sample_seconds,
)
from hetero_fw.planning.pool import Counts, DevicePool
from hetero_fw.planning.precision import choose_precision, computes_natively
from hetero_fw.planning.request import PlanRequest
from hetero_fw.planning.shares import SpeedGroup, balanced_shares

ClassShares = tuple[tuple[int, ...], ...]
"""Samples of each used device, by class."""
_MAX_MICROBATCH_COUNTS = 12


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is planned. Emulated clusters have no communication that pacing would not hide."""

    pool: DevicePool
    work: StepWork
    request: PlanRequest
    has_communication: bool = True


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to train that fits, with its predicted times in seconds."""

    counts: Counts
    shares: ClassShares
    precision: Precision
    zero_stage: int
    num_microbatches: int
    compute_s: float
    communication_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.communication_s

    @property
    def num_devices(self) -> int:
        return sum(self.counts)


def balanced_candidate(problem: Problem, counts: Counts) -> Candidate | None:
    """The fastest split of the batch over the chosen devices, None if nothing fits."""
    return _first_fastest(
        layout.candidate(shares, count)
        for layout in layouts(problem, counts)
        for count in layout.microbatch_counts()
        if (shares := layout.balanced(count))
    )


def fixed_candidate(problem: Problem, counts: Counts, shares: ClassShares) -> Candidate | None:
    """The given shares in as few micro-batches as fit, None if they do not fit."""
    return _first_fastest(
        layout.candidate(shares, count)
        for layout in layouts(problem, counts)
        if (count := layout.fewest_microbatches(shares))
    )


def _first_fastest(found: Iterable[Candidate]) -> Candidate | None:
    """Of equally fast ones the first: the better ZeRO stage, the fewer micro-batches."""
    best: Candidate | None = None
    for candidate in found:
        if best is None or candidate.step_s < best.step_s * (1 - 1e-9):
            best = candidate
    return best


def layouts(problem: Problem, counts: Counts) -> Iterator[Layout]:
    """The ZeRO stages that the request allows for the chosen devices, best first.

    There is none if a device lacks the precision that was asked for.
    """
    devices, requested = problem.pool.devices(counts), problem.request.precision
    if requested != "auto":
        dtype = Precision(requested).compute_dtype
        if not all(computes_natively(device, dtype) for device in devices):
            return
    precision = choose_precision(devices, requested).precision
    world_size = sum(counts)
    for stage in (0,) if world_size == 1 else problem.request.zero_stages:
        sharding = Sharding(zero_stage=stage, world_size=world_size, precision=precision)
        yield Layout(problem=problem, counts=counts, sharding=sharding)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Chosen devices with their sharding; the shares are still open."""

    problem: Problem
    counts: Counts
    sharding: Sharding

    @cached_property
    def _used(self) -> list[tuple[int, DeviceSpec, float]]:
        """(devices, specification, seconds a sample) of each used class."""
        work, precision = self.problem.work, self.sharding.precision
        return [
            (count, entry.device, sample_seconds(entry.device, work, precision))
            for entry, count in zip(self.problem.pool.classes, self.counts, strict=True)
            if count
        ]

    @cached_property
    def _largest(self) -> dict[bool, list[int]]:
        """Largest micro-batch of each used class, by whether gradients accumulate."""
        return {
            several: [self._largest_microbatch(device, several) for _, device, _ in self._used]
            for several in (False, True)
        }

    def required_bytes(self, device: DeviceSpec, microbatch: int, num_microbatches: int) -> int:
        """Peak memory of a device with micro-batches of up to `microbatch` samples."""
        work = self.problem.work
        fixed = self.sharding.fixed_bytes(work, device.kind, is_accumulating=num_microbatches > 1)
        return fixed + math.ceil(microbatch * sample_bytes(work, self.sharding.precision))

    def _largest_microbatch(self, device: DeviceSpec, is_accumulating: bool) -> int:
        request, work = self.problem.request, self.problem.work
        fixed = self.sharding.fixed_bytes(work, device.kind, is_accumulating=is_accumulating)
        room = budget_bytes(device, request.memory_margin) - fixed
        each = sample_bytes(work, self.sharding.precision)
        most = request.max_microbatch_size or request.global_batch_size
        if room < each:
            return 0
        return min(most, int(room / each)) if each else most

    def balanced(self, num_microbatches: int) -> ClassShares | None:
        """The split with the earliest finish that fits into so many micro-batches."""
        largest = self._largest[num_microbatches > 1]
        groups = [
            SpeedGroup(num_ranks=n, sample_s=s, max_samples=num_microbatches * most)
            for (n, _, s), most in zip(self._used, largest, strict=True)
        ]
        shares = balanced_shares(self.problem.request.global_batch_size, groups)
        return self._by_class(shares) if shares else None

    def _by_class(self, shares: ClassShares) -> ClassShares:
        remaining = iter(shares)
        return tuple(next(remaining) if count else () for count in self.counts)

    def microbatch_counts(self) -> list[int]:
        """Counts to try: from the fewest that hold the batch to those that restrain no share."""
        request = self.problem.request
        if request.fixed_num_microbatches:
            return [request.fixed_num_microbatches]
        batch = request.global_batch_size
        free = balanced_shares(
            batch,
            [SpeedGroup(num_ranks=n, sample_s=s, max_samples=batch) for n, _, s in self._used],
        )
        if free is None:
            return []
        fewest, most = self._fewest_for_batch(), self.fewest_microbatches(self._by_class(free))
        if not fewest:
            return []
        # The count that an equal split needs: with it no balanced split is slower than that.
        per_rank = -(-batch // sum(self.counts))
        equal = -(-per_rank // max(1, min(self._largest[True])))
        spaced = _spaced(fewest, max(fewest, most))
        return sorted({*spaced, min(max(equal, fewest), max(fewest, most))})

    def _fewest_for_batch(self) -> int:
        batch = self.problem.request.global_batch_size
        sizes = {
            several: sum(n * most for (n, _, _), most in zip(self._used, largest, strict=True))
            for several, largest in self._largest.items()
        }
        if min(self._largest[False]) and sizes[False] >= batch:
            return 1
        return max(2, -(-batch // sizes[True])) if min(self._largest[True]) else 0

    def fewest_microbatches(self, shares: ClassShares) -> int:
        """The fewest micro-batches in which the shares fit, 0 if they never do."""
        peaks = [max(members) for members in shares if members]
        fixed = self.problem.request.fixed_num_microbatches
        for count in (fixed,) if fixed else (1, *self._accumulated(peaks)):
            largest = self._largest[count > 1]
            if all(max(1, -(-p // count)) <= most for p, most in zip(peaks, largest, strict=True)):
                return count
        return 0

    def _accumulated(self, peaks: list[int]) -> tuple[int, ...]:
        largest = self._largest[True]
        if not min(largest):
            return ()
        return (max(2, *(-(-p // most) for p, most in zip(peaks, largest, strict=True))),)

    def candidate(self, shares: ClassShares, num_microbatches: int) -> Candidate:
        """The predicted step of these shares, which must fit."""
        peaks = [max(members) for members in shares if members]
        compute_s = max(
            busy_seconds(peak, num_microbatches, sample_s)
            for peak, (_, _, sample_s) in zip(peaks, self._used, strict=True)
        )
        communication_s = 0.0
        if self.problem.has_communication and self.sharding.world_size > 1:
            communication_s = exposed_seconds(
                self.problem.work,
                self.sharding,
                self.problem.pool.ring(self.counts),
                num_microbatches=num_microbatches,
                compute_s=compute_s,
            )
        return Candidate(
            counts=self.counts,
            shares=shares,
            precision=self.sharding.precision,
            zero_stage=self.sharding.zero_stage,
            num_microbatches=num_microbatches,
            compute_s=compute_s,
            communication_s=communication_s,
        )


def _spaced(first: int, last: int) -> set[int]:
    """Counts from `first` to `last`, evenly spaced if there are many."""
    span = last - first
    steps = min(span, _MAX_MICROBATCH_COUNTS - 1)
    return {first + span * step // steps for step in range(steps + 1)} if steps else {first}
