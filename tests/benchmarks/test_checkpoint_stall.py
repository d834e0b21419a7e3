"""What a save costs training, and how fast it is read back, beside what others offer.

Two ranks share one machine's cores and save 856 MB: parameters and AdamW state in fp32. Every way
saves the same tensors of the same training, one way after the other. A stall is how long the
training loop stands still for a save, on the rank where it is longest; its cost includes how much
slower the steps are while the save is written, and with ours while it is read back and verified, so
that an older one can be deleted. What others leave is deleted between saves, at no cost to them.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import psutil
import pytest
import torch
import torch.distributed as dist

from hetero_fw.policies import IntervalRule, daly_interval_s
from tests.benchmarks.checkpoint_baselines import (
    STATE_BYTES,
    Method,
    Training,
    dcp_process,
    dcp_sync,
    dcp_thread,
    lightning_stalls_s,
    ours,
    restore_dcp,
    restore_ours,
)
from tests.benchmarks.figures import show
from tests.distributed.ranks import run_ranks

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(900)]

BATCH_SIZE = 8
NUM_SAVES = 5  # and one more before them, which starts processes and gets memory
NUM_WINDOW_STEPS = 2
NUM_RESTORES = 5
NUM_WINDOW_PAIRS = 3
# Mean time between failures: what the policy assumes before it has seen one.
MTBF_S = IntervalRule().prior_mtbf_s
OURS = "ours, async_with_pinned_mem"
PROCESS, SYNC = "DCP async_save PROCESS", "DCP save"

Make = Callable[[Training, Path], Method]
our_best = partial(ours, mode="async_with_pinned_mem")
METHODS: tuple[Make, ...] = (
    our_best,
    partial(ours, mode="async"),
    partial(ours, mode="disabled"),
    dcp_sync,
    dcp_thread,
    dcp_process,
)
RESTORES: dict[Make, Callable[[Training, Path], None]] = {
    our_best: restore_ours,
    dcp_sync: restore_dcp,
}


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of one save, on one rank or the worst of all, in seconds.

    Attributes:
        stall_s: in the save call and before the optimizer step.
        persist_s: from there until it is complete.
        cost_s: by how much the steps and the save took longer than the steps alone.
        plain_step_s: of the steps just before, without a save.
    """

    stall_s: float
    persist_s: float
    cost_s: float
    plain_step_s: float


@dataclass(frozen=True, kw_only=True)
class Restores:
    """Times of loads with the files in memory, and bytes read from the disk by one without."""

    times_s: list[float]
    read_bytes: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one rank measured, by method."""

    costs: dict[str, list[Costs]]
    restores: dict[str, Restores]
    lightning_stalls_s: list[float]


def window_s(training: Training, num_steps: int) -> float:
    """Seconds for some steps without a save, the agreement between them included."""
    began_s = time.perf_counter()
    for _ in range(num_steps):
        training.step()
        training.any_of(False)
    return time.perf_counter() - began_s


def save_once(training: Training, method: Method, step: int) -> Costs:
    """Steps without a save, then a save and steps until it is complete on all ranks."""
    plain_step_s = window_s(training, NUM_WINDOW_STEPS) / NUM_WINDOW_STEPS
    began_s = time.perf_counter()
    pending = method.save(step)
    stall_s = time.perf_counter() - began_s
    num_steps, is_pending = 0, True
    while num_steps < NUM_WINDOW_STEPS or is_pending:
        stall_s += training.step(method.before_optimizer_step)
        is_pending = training.any_of(not pending.wait(0.0))
        num_steps += 1
    return Costs(
        stall_s=stall_s,
        persist_s=pending.persist_s(),
        cost_s=time.perf_counter() - began_s - num_steps * plain_step_s,
        plain_step_s=plain_step_s,
    )


def save_many(training: Training, method: Method) -> list[Costs]:
    """Costs of the saves after the first; only the last checkpoint stays."""
    costs = []
    last_step = NUM_SAVES + 1
    for step in range(1, last_step + 1):
        costs.append(save_once(training, method, step))
        if training.rank == 0 and step < last_step and method.num_kept is None:
            shutil.rmtree(method.path(step))
    method.close()
    if training.rank == 0 and method.num_kept is not None:
        for step in range(last_step - method.num_kept + 1, last_step):
            shutil.rmtree(method.path(step))
    return costs[1:]


def restore_many(training: Training, paths: dict[Make, Path]) -> dict[Make, Restores]:
    """Restore by each way in turn, over and over, so that a busy moment meets them alike."""
    times_s: dict[Make, list[float]] = {make: [] for make in paths}
    for _ in range(NUM_RESTORES):
        for make, path in paths.items():
            dist.barrier(training.group)
            began_s = time.perf_counter()
            RESTORES[make](training, path)
            dist.barrier(training.group)
            times_s[make].append(time.perf_counter() - began_s)
    return {
        make: Restores(times_s=times_s[make], read_bytes=bytes_read(training, make, path))
        for make, path in paths.items()
    }


def bytes_read(training: Training, make: Make, path: Path) -> int:
    forget_files(path)
    dist.barrier(training.group)
    before = psutil.Process().io_counters().read_bytes
    RESTORES[make](training, path)
    return int(psutil.Process().io_counters().read_bytes - before)


def forget_files(folder: Path) -> None:
    """Have the kernel drop its copies, so that the disk is read again."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def run_all(rank: int, group: dist.ProcessGroup, root: str) -> Measured:
    training = Training(rank, group, BATCH_SIZE)
    window_s(training, 2 * NUM_WINDOW_STEPS)
    costs: dict[str, list[Costs]] = {}
    names: dict[Make, str] = {}
    paths: dict[Make, Path] = {}
    for index, make in enumerate(METHODS):
        method = make(training, Path(root) / str(index))
        costs[method.name] = save_many(training, method)
        names[make], paths[make] = method.name, method.path(NUM_SAVES + 1)
    restores = restore_many(training, {make: paths[make] for make in RESTORES})
    dist.barrier(group)
    if rank == 0:
        for path in paths.values():
            shutil.rmtree(path)
    stalls_s = lightning_stalls_s(training, Path(root) / "lightning", NUM_SAVES + 1)[1:]
    return Measured(
        costs=costs,
        restores={names[make]: of for make, of in restores.items()},
        lightning_stalls_s=stalls_s,
    )


def run_windows(rank: int, group: dist.ProcessGroup, root: str) -> tuple[float, list[float]]:
    """Windows of the optimal interval with one save in each, in turn with windows without.

    Returns the interval and, for each pair, the speed with a save over that without.
    """
    training = Training(rank, group, BATCH_SIZE)
    window_s(training, 2 * NUM_WINDOW_STEPS)
    method = our_best(training, Path(root))
    costs = []
    for step in range(1, NUM_SAVES + 2):
        costs.append(save_once(training, method, step).cost_s)
    cost = torch.tensor([max(1e-6, median(costs[1:]))])
    dist.all_reduce(cost, op=dist.ReduceOp.MAX, group=group)
    interval_s = daly_interval_s(float(cost), MTBF_S)
    ratios = []
    for index in range(NUM_WINDOW_PAIRS):
        # The other one first each time: what makes a machine slower over time meets both alike.
        order = (True, False) if index % 2 else (False, True)
        speed = {
            with_save: speed_of(training, method, interval_s, NUM_SAVES + 2 + index, with_save)
            for with_save in order
        }
        ratios.append(speed[True] / speed[False])
    method.close()
    return interval_s, ratios


def speed_of(
    training: Training, method: Method, interval_s: float, step: int, with_save: bool
) -> float:
    """Steps a second over one window, the save at its begin included."""
    began_s = time.perf_counter()
    pending = method.save(step) if with_save else None
    num_steps = 0
    while training.any_of(time.perf_counter() - began_s < interval_s):
        training.step(method.before_optimizer_step)
        num_steps += 1
    taken_s = time.perf_counter() - began_s
    assert pending is None or not training.any_of(not pending.wait(0.0))
    return num_steps / taken_s


def worst(ranks: Sequence[Sequence[Costs]]) -> list[Costs]:
    """Each save as the rank had it that it cost most; training goes on with the last."""
    return [
        Costs(
            stall_s=max(cost.stall_s for cost in costs),
            persist_s=max(cost.persist_s for cost in costs),
            cost_s=max(cost.cost_s for cost in costs),
            plain_step_s=max(cost.plain_step_s for cost in costs),
        )
        for costs in zip(*ranks, strict=True)
    ]


def overhead(cost_s: float) -> float:
    """Part of the time that saves take if they come at the optimal interval."""
    cost_s = max(cost_s, 1e-6)
    return cost_s / (daly_interval_s(cost_s, MTBF_S) + cost_s)


def row(name: str, costs: Sequence[Costs]) -> str:
    stall_s = median(cost.stall_s for cost in costs)
    persist_s = median(cost.persist_s for cost in costs)
    cost_s = median(cost.cost_s for cost in costs)
    step_s = median(cost.plain_step_s for cost in costs)
    slow = NUM_WINDOW_STEPS * step_s / (NUM_WINDOW_STEPS * step_s + max(0.0, cost_s))
    return (
        f"{name:28} {stall_s * 1000:8.1f} {persist_s:9.2f} {cost_s:9.2f} {step_s:8.2f} "
        f"{100 * slow:9.1f} {daly_interval_s(max(cost_s, 1e-6), MTBF_S):9.0f} "
        f"{100 * (1 - overhead(cost_s)):9.2f}"
    )


def restore_row(name: str, ranks: Sequence[Restores]) -> str:
    parts = sum(restores.read_bytes for restores in ranks) / STATE_BYTES
    return f"{name:28} {restore_s(ranks):8.2f} s, {parts:.2f} x the state read from the disk"


def restore_s(ranks: Sequence[Restores]) -> float:
    return median(map(max, zip(*(restores.times_s for restores in ranks), strict=True)))


def stall_s(costs: Sequence[Costs]) -> float:
    return median(cost.stall_s for cost in costs)


def test_saves_cost_less_than_with_what_there_is(tmp_path: Path) -> None:
    ranks: list[Measured] = run_ranks(run_all, 2, str(tmp_path), timeout_s=600.0)
    costs = {name: worst([rank.costs[name] for rank in ranks]) for name in ranks[0].costs}
    restores = {name: [rank.restores[name] for rank in ranks] for name in ranks[0].restores}
    lightning_s = median(map(max, zip(*(rank.lightning_stalls_s for rank in ranks), strict=True)))
    show(
        f"{STATE_BYTES / 1e6:.0f} MB on 2 ranks, medians of {NUM_SAVES} saves; speed in windows of "
        f"{NUM_WINDOW_STEPS} steps or the save's length, then at the optimal interval for a "
        f"failure every {MTBF_S / 3600:.0f} h",
        f"{'':28} {'stall/ms':>8} {'persist/s':>9} {'cost/s':>9} {'step/s':>8} {'speed/%':>9} "
        f"{'T_opt/s':>9} {'speed/%':>9}",
        *(row(name, of) for name, of in costs.items()),
        f"{'Lightning ModelCheckpoint':28} {lightning_s * 1000:8.1f}",
        f"medians of {NUM_RESTORES} restores",
        *(restore_row(name, of) for name, of in restores.items()),
    )
    best, process, sync = (costs[name] for name in (OURS, PROCESS, SYNC))
    assert stall_s(best) <= 0.5 * stall_s(process)
    assert stall_s(best) <= 0.05 * stall_s(sync)
    assert overhead(median(cost.cost_s for cost in best)) <= 0.02
    assert restore_s(restores[OURS]) <= restore_s(restores[SYNC])


@pytest.mark.timeout(1800)
def test_training_with_saves_at_the_best_interval_is_as_fast(tmp_path: Path) -> None:
    ranks = run_ranks(run_windows, 2, str(tmp_path), timeout_s=1500.0)
    interval_s, _ = ranks[0]
    ratios = [min(of) for of in zip(*(ratios for _, ratios in ranks), strict=True)]
    show(
        f"{STATE_BYTES / 1e6:.0f} MB on 2 ranks, a save each {interval_s:.0f} s against none: "
        + ", ".join(f"{ratio:.3f}" for ratio in ratios)
    )
    assert median(ratios) >= 0.98
