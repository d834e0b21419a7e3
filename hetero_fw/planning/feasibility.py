"""Why nothing fits: the tightest device, by how much, and what would help."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hetero_fw.errors import InfeasiblePlanError
from hetero_fw.hardware import GIB, DeviceSpec
from hetero_fw.planning.cost import budget_bytes
from hetero_fw.planning.evaluate import Layout, Problem, layouts
from hetero_fw.planning.plan import PlanKind
from hetero_fw.planning.pool import Counts


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """A device that cannot hold the least that a layout asks of it."""

    device: DeviceSpec
    node_index: int
    layout: Layout
    microbatch: int
    required_bytes: int
    budget_bytes: int

    @property
    def missing_bytes(self) -> int:
        return self.required_bytes - self.budget_bytes


def infeasible(problem: Problem, subsets: Iterable[Counts]) -> InfeasiblePlanError:
    """The error for a problem that none of the `subsets` of its devices can solve.

    It names the tightest device of the subset that comes closest to fitting.
    """
    tightest = [
        max(found, key=lambda short: short.missing_bytes)
        for counts in subsets
        if (found := list(_shortfalls(problem, counts)))
    ]
    closest = min(
        tightest, key=lambda short: (short.missing_bytes, -short.layout.sharding.world_size)
    )
    return InfeasiblePlanError(_message(problem, closest))


def _shortfalls(problem: Problem, counts: Counts) -> Iterator[Shortfall]:
    request = problem.request
    # The last layout takes the least memory.
    for layout in list(layouts(problem, counts))[-1:]:
        share = max(request.given_shares or [-(-request.global_batch_size // sum(counts))])
        num_microbatches = request.fixed_num_microbatches or share
        microbatch = -(-share // num_microbatches)
        for entry, count in zip(problem.pool.classes, counts, strict=True):
            if not count:
                continue
            short = Shortfall(
                device=entry.device,
                node_index=entry.nodes[0][0],
                layout=layout,
                microbatch=microbatch,
                required_bytes=layout.required_bytes(entry.device, microbatch, num_microbatches),
                budget_bytes=budget_bytes(entry.device, request.memory_margin),
            )
            if short.missing_bytes > 0:
                yield short


def _message(problem: Problem, short: Shortfall) -> str:
    node = problem.pool.cluster.nodes[short.node_index]
    world_size = short.layout.sharding.world_size
    samples = "1 sample" if short.microbatch == 1 else f"{short.microbatch} samples"
    state = "one device" if world_size == 1 else f"the state in {world_size} equal shards"
    return (
        f"No plan fits cluster {problem.pool.cluster.name}. The tightest device is "
        f"{short.device.name} on node {node.name}: with {state} and micro-batches of {samples} "
        f"it needs {_gib(short.required_bytes)} GiB and may use {_gib(short.budget_bytes)} GiB "
        f"({_gib(short.device.memory_bytes)} GiB less "
        f"parallel.memory_margin={problem.request.memory_margin:g}), "
        f"{_gib(short.missing_bytes)} GiB too little. {_remedy(problem, node.group)}"
    )


def _remedy(problem: Problem, group: str) -> str:
    request, options = problem.request, []
    if request.kind == PlanKind.SINGLE:
        options.append("shard the model over all devices with parallel=auto")
    if request.zero_stage == 2:
        options.append("set parallel.zero_stage=auto")
    if request.fixed_num_microbatches:
        options.append("set parallel.num_microbatches=auto")
    if request.kind != PlanKind.SINGLE:
        options.append(f"add devices (hardware.groups.{group}.num_nodes)")
    options.append("use devices with more memory or a smaller model")
    text = "; or ".join(options)
    return f"{text[0].upper()}{text[1:]}."


def _gib(num_bytes: int) -> str:
    value = num_bytes / GIB
    return f"{value:.1f}" if value >= 0.1 else f"{value:.3f}"
