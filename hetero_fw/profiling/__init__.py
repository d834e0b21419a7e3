"""Measure devices and pace the processes that stand in for absent ones."""

from hetero_fw.profiling.memory import MemoryMeter, is_out_of_memory, limit_memory
from hetero_fw.profiling.pacing import Pacer
from hetero_fw.profiling.probe import (
    match_device,
    probe_cuda_devices,
    probe_host_flops,
    probe_local_groups,
)

__all__ = [
    "MemoryMeter",
    "Pacer",
    "is_out_of_memory",
    "limit_memory",
    "match_device",
    "probe_cuda_devices",
    "probe_host_flops",
    "probe_local_groups",
]
