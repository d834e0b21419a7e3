"""Clusters and workloads that several planning tests use, and strategies that draw them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from hetero_fw.hardware import (
    ClusterSpec,
    LayerProfile,
    NodeSpec,
    WorkloadProfile,
    build_cluster,
    device,
    link,
)
from hetero_fw.planning import ParallelPlan, PlanRequest, make_plan


def cluster(*groups: tuple[str, int, int], **fields: Any) -> ClusterSpec:
    """From (device, nodes, devices in each node); groups are named after their devices."""
    return build_cluster(
        name="example",
        groups={
            name.split("-")[0]: {
                "device": name,
                "num_nodes": num_nodes,
                "devices_per_node": num_devices,
                **fields,
            }
            for name, num_nodes, num_devices in groups
        },
        intra_link="nvlink3",
        inter_link="eth_100g",
    )


def workload(
    *,
    num_layers: int = 4,
    params: int = 1_000_000,
    flops: float = 1e12,
    activation_bytes: int = 1_000_000,
) -> WorkloadProfile:
    """Equal layers; the arguments are for one of them."""
    return WorkloadProfile(
        name="example",
        layers=tuple(
            LayerProfile(
                name=f"layers.{index}",
                num_params=params,
                forward_flops=flops / 3,
                backward_flops=flops * 2 / 3,
                activation_bytes=activation_bytes,
            )
            for index in range(num_layers)
        ),
    )


MIX = cluster(("a100-80gb", 1, 2), ("v100-32gb", 1, 2))
COMPUTE_BOUND = workload(flops=1e13, params=10_000)


def plan(
    cluster_spec: ClusterSpec = MIX, work: WorkloadProfile = COMPUTE_BOUND, **request: Any
) -> ParallelPlan:
    """`make_plan` with request fields as keywords; the batch is 64 unless given."""
    return make_plan(cluster_spec, work, PlanRequest(**{"global_batch_size": 64, **request}))


DEVICE_NAMES = ("h100-80gb", "a100-40gb", "v100-16gb", "t4", "l4", "tpu-v4", "cpu")


@st.composite
def clusters(draw: st.DrawFn, max_nodes: int = 3, max_devices: int = 3) -> ClusterSpec:
    """Small clusters of any mixture, with NVLink inside nodes and Ethernet between them."""
    kinds = draw(
        st.lists(
            st.tuples(st.sampled_from(DEVICE_NAMES), st.integers(1, max_devices)),
            min_size=1,
            max_size=max_nodes,
        )
    )
    nodes = tuple(node(index, name, size) for index, (name, size) in enumerate(kinds))
    return ClusterSpec(name="drawn", nodes=nodes)


def node(index: int, name: str, num_devices: int) -> NodeSpec:
    return NodeSpec(
        name=f"n-{index}",
        group="n",
        device=device(name),
        num_devices=num_devices,
        intra_link=link("nvlink3"),
        inter_link=link("eth_25g"),
    )


@st.composite
def workloads(draw: st.DrawFn) -> WorkloadProfile:
    """From bound by communication to bound by compute, from small to too large for a T4."""
    return workload(
        num_layers=draw(st.integers(1, 4)),
        params=draw(st.sampled_from([1_000, 10_000_000, 200_000_000])),
        flops=draw(st.sampled_from([1e9, 1e12, 1e14])),
        activation_bytes=draw(st.sampled_from([0, 10_000_000, 500_000_000])),
    )
