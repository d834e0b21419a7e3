"""What there is: clusters, nodes, devices and links, and what a model's step costs."""

from hetero_fw.hardware.catalog import DEVICES, LINKS, device, link
from hetero_fw.hardware.cluster import build_cluster
from hetero_fw.hardware.emulate import emulated_cluster
from hetero_fw.hardware.spec import (
    GIB,
    ClusterSpec,
    DeviceKind,
    DeviceSpec,
    Dtype,
    LinkSpec,
    NodeSpec,
    Precision,
)
from hetero_fw.hardware.workload import LayerProfile, WorkloadProfile

__all__ = [
    "DEVICES",
    "GIB",
    "LINKS",
    "ClusterSpec",
    "DeviceKind",
    "DeviceSpec",
    "Dtype",
    "LayerProfile",
    "LinkSpec",
    "NodeSpec",
    "Precision",
    "WorkloadProfile",
    "build_cluster",
    "device",
    "emulated_cluster",
    "link",
]
