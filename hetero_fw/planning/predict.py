"""The predicted step of a finished plan, on the cluster it was made for or on another like it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from hetero_fw.hardware import ClusterSpec, WorkloadProfile
from hetero_fw.planning.cost import (
    Sharding,
    StepWork,
    busy_seconds,
    exposed_seconds,
    sample_seconds,
)
from hetero_fw.planning.plan import ParallelPlan
from hetero_fw.planning.pool import DevicePool


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """Predicted times of one step in seconds; `communication_s` is what compute does not hide."""

    compute_s: float
    communication_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.communication_s


def predict_step(
    cluster: ClusterSpec, workload: WorkloadProfile, plan: ParallelPlan
) -> StepPrediction:
    """How long a step of `plan` takes on `cluster`, whose nodes its ranks name by `node_index`."""
    work = StepWork.of(workload)
    count = plan.num_microbatches
    compute_s = max(
        busy_seconds(
            rank.num_samples,
            count,
            sample_seconds(cluster.nodes[rank.node_index].device, work, plan.precision),
        )
        for rank in plan.ranks
    )
    if plan.world_size == 1:
        return StepPrediction(compute_s=compute_s, communication_s=0.0)
    used = Counter(rank.node_index for rank in plan.ranks)
    nodes = (replace(cluster.nodes[index], num_devices=used[index]) for index in sorted(used))
    pool = DevicePool.of(replace(cluster, nodes=tuple(nodes)))
    communication_s = exposed_seconds(
        work,
        Sharding(zero_stage=plan.zero_stage, world_size=plan.world_size, precision=plan.precision),
        pool.ring(pool.all_counts),
        num_microbatches=count,
        compute_s=compute_s,
    )
    return StepPrediction(compute_s=compute_s, communication_s=communication_s)
