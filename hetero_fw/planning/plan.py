"""The plan: who computes which share of each step. Plain frozen data with its reasons."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from hetero_fw.hardware import Precision


class PlanKind(StrEnum):
    """How the ranks divide the work."""

    SINGLE = "single"
    FSDP = "fsdp"


class BatchSplit(StrEnum):
    """How the global batch is divided among ranks."""

    BY_SPEED = "by_speed"
    UNIFORM = "uniform"
    GIVEN = "given"


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """What one rank does in every step.

    Attributes:
        node: name of its node; `node_index` its position in `ClusterSpec.nodes`.
        device: catalog name of its device; `group` the hardware group it was declared in.
        num_samples: its share of the global batch.
        microbatches: sizes of its micro-batches, as many as every other rank has. They sum to
            `num_samples`; a 0 is a padding micro-batch whose gradient has weight 0.
        compute_s: predicted time to compute its share, in seconds.
        required_bytes: predicted peak memory; `budget_bytes` what the device may use.
    """

    rank: int
    node: str
    node_index: int
    local_rank: int
    device: str
    group: str
    num_samples: int
    microbatches: tuple[int, ...]
    compute_s: float
    required_bytes: int
    budget_bytes: int


@dataclass(frozen=True, kw_only=True)
class EmulationPlan:
    """How absent devices are stood in for by CPU processes.

    Attributes:
        dilation: seconds here for one second on the declared devices.
        host_flops_per_s: rate of this machine that the dilation was chosen for.
        declared_step_s: predicted step time of this plan on the declared devices.
    """

    dilation: float
    host_flops_per_s: float
    declared_step_s: float


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """A complete plan: a pure function of cluster, workload and request.

    Attributes:
        precision: what the devices are planned with; `compute_precision` what ranks compute in
            (differs only under emulation).
        zero_stage: 2 keeps gathered parameters through the step, 3 frees them after each use;
            0 for a single rank, where nothing is sharded.
        step_s: predicted step time; `communication_s` the part of it that compute does not hide.
        uniform_step_s: predicted step time of the stock equal split on all devices, None if that
            does not fit.
        best_single_type_step_s: the same for the best subset of equal devices, None if none fits.
        idle_devices: devices that the plan leaves out, as `node/local_rank`.
        reasons: why the plan is as it is, one sentence each.
    """

    kind: PlanKind
    batch_split: BatchSplit
    global_batch_size: int
    precision: Precision
    compute_precision: Precision
    zero_stage: int
    ranks: tuple[RankPlan, ...]
    step_s: float
    communication_s: float
    uniform_step_s: float | None
    best_single_type_step_s: float | None
    idle_devices: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    emulation: EmulationPlan | None = None

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def num_microbatches(self) -> int:
        return len(self.ranks[0].microbatches)

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank, in rank order."""
        return tuple(rank.num_samples for rank in self.ranks)

    @property
    def first_ranks(self) -> dict[str, int]:
        """The first rank of each node, by the node's name, in rank order."""
        first: dict[str, int] = {}
        for rank in self.ranks:
            first.setdefault(rank.node, rank.rank)
        return first

    @property
    def samples_per_s(self) -> float:
        return self.global_batch_size / self.step_s

    def to_dict(self) -> dict[str, Any]:
        """Plain containers that `json.dumps` takes; `from_dict` reads them back."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ParallelPlan:
        """Rebuild a plan from `to_dict`'s output."""
        emulation = data.get("emulation")
        fields = {
            **data,
            "kind": PlanKind(data["kind"]),
            "batch_split": BatchSplit(data["batch_split"]),
            "precision": Precision(data["precision"]),
            "compute_precision": Precision(data["compute_precision"]),
            "ranks": tuple(
                RankPlan(**{**rank, "microbatches": tuple(rank["microbatches"])})
                for rank in data["ranks"]
            ),
            "idle_devices": tuple(data["idle_devices"]),
            "reasons": tuple(data["reasons"]),
            "emulation": EmulationPlan(**emulation) if emulation else None,
        }
        return cls(**fields)

    def fingerprint(self) -> str:
        """Hash of everything in the plan; ranks compare it before they train."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
