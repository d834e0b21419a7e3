"""Readings of a rank's own device and of its host, taken beside training."""

from hetero_fw.monitoring.telemetry.host import (
    HostTelemetry,
    available_memory_bytes,
    cgroup_memory_percent,
)
from hetero_fw.monitoring.telemetry.nvml import NvmlTelemetry
from hetero_fw.monitoring.telemetry.sampling import TelemetrySource, TelemetryThread, merge_readings

__all__ = [
    "HostTelemetry",
    "NvmlTelemetry",
    "TelemetrySource",
    "TelemetryThread",
    "available_memory_bytes",
    "cgroup_memory_percent",
    "merge_readings",
]
