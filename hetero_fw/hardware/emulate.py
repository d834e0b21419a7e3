"""The cluster that this machine stands in for: the same devices, slower by one factor."""

from __future__ import annotations

from dataclasses import replace

from hetero_fw.errors import ConfigError
from hetero_fw.hardware.catalog import LINKS
from hetero_fw.hardware.spec import ClusterSpec, DeviceSpec


def emulated_cluster(cluster: ClusterSpec, dilation: float) -> ClusterSpec:
    """`cluster` as CPU processes emulate it.

    Args:
        cluster: the declared cluster.
        dilation: seconds here for one second on the declared devices.

    Returns:
        The same nodes in the same order: rates divided by `dilation`, links replaced by host
        memory, declared memory sizes unchanged.

    Raises:
        ConfigError: `dilation` is not a positive number.
    """
    if not 0 < dilation < float("inf"):
        raise ConfigError(
            f"hardware.emulation.dilation={dilation} must be a finite number greater than 0, "
            "or auto."
        )
    host = LINKS["host"]
    nodes = tuple(
        replace(node, device=_dilated(node.device, dilation), intra_link=host, inter_link=host)
        for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


def _dilated(device: DeviceSpec, dilation: float) -> DeviceSpec:
    rates = {dtype: peak / dilation for dtype, peak in device.peak_flops.items()}
    return replace(
        device,
        peak_flops=rates,
        memory_bytes_per_s=device.memory_bytes_per_s / dilation,
    )
