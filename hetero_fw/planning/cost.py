"""What a step costs in seconds and bytes. Every figure is for one rank unless it says otherwise.

Compute is linear in samples. Memory is the state's shard, what FSDP gathers, the activations of
one micro-batch and a constant for the runtime. Communication follows FSDP: ZeRO stage 2 gathers
every parameter and reduces every gradient once per step; stage 3 gathers twice (forward and
backward) and reduces once for each micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetero_fw.hardware import GIB, DeviceKind, DeviceSpec, Precision, WorkloadProfile

# Parameters, what FSDP gathers of them, gradients and their reduction are fp32 in every precision.
MASTER_BYTES = 4
_LIVE_UNITS = 2  # FSDP holds the unit in use and the one it prefetches
# Runtime, kernels, library workspaces and communication buffers.
_CONTEXT_BYTES = {
    DeviceKind.CPU: GIB // 2,
    DeviceKind.CUDA: GIB,
    DeviceKind.ROCM: GIB * 3 // 2,
    DeviceKind.TPU: GIB // 2,
}


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The sums over a workload's layers that the cost model needs."""

    flops_per_sample: float
    forward_share: float
    activation_bytes_per_sample: int
    num_params: int
    largest_unit_params: int
    first_unit_params: int
    num_units: int
    optimizer_bytes_per_param: int

    @classmethod
    def of(cls, workload: WorkloadProfile) -> StepWork:
        """Sum up `workload`. A unit is a layer with parameters."""
        sizes = [layer.num_params for layer in workload.layers if layer.num_params] or [0]
        flops = max(workload.flops_per_sample, 1.0)  # times must be positive to be compared
        forward = sum(layer.forward_flops for layer in workload.layers)
        return cls(
            flops_per_sample=flops,
            forward_share=forward / flops,
            activation_bytes_per_sample=workload.activation_bytes_per_sample,
            num_params=sum(sizes),
            largest_unit_params=max(sizes),
            first_unit_params=sizes[0],
            num_units=len(sizes),
            optimizer_bytes_per_param=workload.optimizer_bytes_per_param,
        )


def compute_bytes(precision: Precision) -> int:
    """Bytes of a number in the matrix products."""
    return 4 if precision is Precision.FP32 else 2


def sample_seconds(device: DeviceSpec, work: StepWork, precision: Precision) -> float:
    """Seconds for the forward and backward pass of one sample."""
    return work.flops_per_sample / device.flops_per_s(precision)


def busy_seconds(num_samples: int, num_microbatches: int, sample_s: float) -> float:
    """Seconds to compute a share. A padding micro-batch computes one sample of weight 0."""
    return max(num_samples, num_microbatches) * sample_s


def budget_bytes(device: DeviceSpec, memory_margin: float) -> int:
    """Memory that a plan may use."""
    return int(device.memory_bytes * (1 - memory_margin))


def sample_bytes(work: StepWork, precision: Precision) -> float:
    """Activation bytes of one sample in a micro-batch."""
    return work.activation_bytes_per_sample * compute_bytes(precision) / MASTER_BYTES


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How the model's state is spread: it decides memory and communication.

    Attributes:
        zero_stage: as in `ParallelPlan`.
        world_size: ranks that share the state in equal parts.
    """

    zero_stage: int
    world_size: int
    precision: Precision

    def fixed_bytes(self, work: StepWork, kind: DeviceKind, *, is_accumulating: bool) -> int:
        """Bytes on a device of `kind` that do not depend on the micro-batch's size.

        With more than one micro-batch, `is_accumulating`, stage 2 keeps whole gradients.
        """
        per_param = 2 * MASTER_BYTES + work.optimizer_bytes_per_param
        state = math.ceil(work.num_params * per_param / self.world_size)
        return state + self._gathered_bytes(work, is_accumulating) + _CONTEXT_BYTES[kind]

    def _gathered_bytes(self, work: StepWork, is_accumulating: bool) -> int:
        # Autocast's half-precision weights live in the graph until backward has used them.
        width = compute_bytes(self.precision)
        cast = 0 if width == MASTER_BYTES else work.num_params * width
        if self.zero_stage == 0:
            return cast
        whole = work.num_params * MASTER_BYTES
        units = _LIVE_UNITS * work.largest_unit_params * MASTER_BYTES
        if self.zero_stage == 3:
            return cast + units + units
        return cast + whole + (whole if is_accumulating else units)


@dataclass(frozen=True, kw_only=True)
class Ring:
    """A ring through all ranks in rank order.

    It crosses each node's NIC once in each direction however many devices the node has. A ring
    all-gather or reduce-scatter moves (n - 1) / n of the bytes over every link (Patarasuk and
    Yuan, 2009), so the slowest link sets the pace, while the latencies add up along the ring.

    Attributes:
        bytes_per_s: rate of the slowest link.
        latency_s: once around the ring.
    """

    world_size: int
    bytes_per_s: float
    latency_s: float

    def collective_s(self, total_bytes: float, num_calls: int = 1) -> float:
        """Seconds of `num_calls` all-gathers or reduce-scatters of `total_bytes` together."""
        moved = (self.world_size - 1) / self.world_size
        return moved * (num_calls * self.latency_s + total_bytes / self.bytes_per_s)


def exposed_seconds(
    work: StepWork, sharding: Sharding, ring: Ring, *, num_microbatches: int, compute_s: float
) -> float:
    """Communication of a step that compute does not hide, in seconds.

    Gathers overlap the forward pass, gathers and reductions the backward pass; the first unit's
    gather and last reduction have nothing to overlap with. `compute_s` is what the slowest rank
    computes in the step, all micro-batches together.
    """
    # A gather and a reduction move the same bytes.
    each_s = ring.collective_s(work.num_params * MASTER_BYTES, work.num_units)
    ends_s = ring.collective_s(2 * work.first_unit_params * MASTER_BYTES, 2)
    if sharding.zero_stage == 3:
        rounds, overlap_s = num_microbatches, compute_s
        backward_traffic_s = num_microbatches * 2 * each_s
    else:
        rounds, overlap_s = 1, compute_s / num_microbatches
        backward_traffic_s = each_s
    forward_s = overlap_s * work.forward_share
    in_forward = max(0.0, rounds * each_s - forward_s)
    in_backward = max(0.0, backward_traffic_s - (overlap_s - forward_s))
    return max(ends_s, in_forward + in_backward)
