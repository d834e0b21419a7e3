"""What a cluster is made of: declared facts only, no measurement and no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

GIB = 2**30


class Dtype(StrEnum):
    """Number formats a device computes in. TF32 is a mode of fp32 matrix units."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"


class Precision(StrEnum):
    """Training precision by Lightning's names."""

    FP32 = "32-true"
    BF16_MIXED = "bf16-mixed"
    FP16_MIXED = "16-mixed"

    @property
    def compute_dtype(self) -> Dtype:
        """The dtype of matrix products under this precision."""
        return {
            Precision.FP32: Dtype.FP32,
            Precision.BF16_MIXED: Dtype.BF16,
            Precision.FP16_MIXED: Dtype.FP16,
        }[self]


class DeviceKind(StrEnum):
    """Which runtime drives the device."""

    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"
    TPU = "tpu"


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """A link between devices or nodes: transfer time = latency_s + bytes / bytes_per_s."""

    name: str
    bytes_per_s: float
    latency_s: float = 5e-6


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One device type.

    Attributes:
        name: catalog key, for example `a100-80gb`.
        peak_flops: dense peak rate in FLOP/s for each dtype the device computes natively.
            A dtype that is missing is emulated or not available at all.
        memory_bytes: device memory (for a CPU: the share of host memory a rank may use).
        memory_bytes_per_s: memory bandwidth.
        mfu: share of the peak that training reaches, in (0, 1]; a planning figure.
        compute_capability: CUDA compute capability, None elsewhere.
        source: where the figures come from.
    """

    name: str
    kind: DeviceKind
    memory_bytes: int
    peak_flops: Mapping[Dtype, float]
    memory_bytes_per_s: float
    mfu: float = 0.4
    compute_capability: tuple[int, int] | None = None
    source: str = ""

    def is_native(self, dtype: Dtype) -> bool:
        """Whether the device computes `dtype` in hardware."""
        return dtype in self.peak_flops

    def flops_per_s(self, precision: Precision) -> float:
        """Rate that training reaches under `precision`, in FLOP/s (peak x mfu).

        A precision that is not native runs at the fp32 rate, as PyTorch does when it emulates.
        """
        dtype = precision.compute_dtype
        peak = self.peak_flops.get(dtype, self.peak_flops[Dtype.FP32])
        return peak * self.mfu


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """One host with equal devices.

    Attributes:
        name: unique in the cluster, for example `a100-0`.
        group: the hardware group it was declared in, for example `a100`.
        intra_link: link between the devices of this node.
        inter_link: link from this node to other nodes (its NIC).
    """

    name: str
    group: str
    device: DeviceSpec
    num_devices: int
    intra_link: LinkSpec
    inter_link: LinkSpec


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """All nodes, in rank order. `planning_only` clusters can be planned for but not run on."""

    name: str
    nodes: tuple[NodeSpec, ...]
    planning_only: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def num_devices(self) -> int:
        return sum(node.num_devices for node in self.nodes)

    @property
    def device_types(self) -> tuple[DeviceSpec, ...]:
        """Distinct device types in node order."""
        seen: dict[str, DeviceSpec] = {}
        for node in self.nodes:
            seen.setdefault(node.device.name, node.device)
        return tuple(seen.values())
