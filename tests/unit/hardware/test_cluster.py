from __future__ import annotations

from typing import Any

import pytest

from hetero_fw.errors import ConfigError
from hetero_fw.hardware import GIB, ClusterSpec, build_cluster

A100 = {"device": "a100-80gb", "num_nodes": 1, "devices_per_node": 2}
V100 = {"device": "v100-32gb", "num_nodes": 2, "devices_per_node": 4}


def build(groups: Any, **options: Any) -> ClusterSpec:
    links = {"intra_link": "nvlink3", "inter_link": "eth_25g"}
    return build_cluster(name="test", groups=groups, **{**links, **options})


def test_nodes_follow_the_groups() -> None:
    cluster = build({"a100": A100, "v100": V100}, planning_only=True, notes=["a note"])
    assert [node.name for node in cluster.nodes] == ["a100-0", "v100-0", "v100-1"]
    assert [node.group for node in cluster.nodes] == ["a100", "v100", "v100"]
    assert cluster.num_devices == 10
    assert [spec.name for spec in cluster.device_types] == ["a100-80gb", "v100-32gb"]
    assert cluster.nodes[0].intra_link.name == "nvlink3"
    assert cluster.nodes[0].inter_link.name == "eth_25g"
    assert (cluster.planning_only, cluster.notes) == (True, ("a note",))


def test_a_group_without_nodes_is_absent() -> None:
    cluster = build({"a100": A100, "v100": {**V100, "num_nodes": 0}})
    assert [node.group for node in cluster.nodes] == ["a100"]


def test_overrides_replace_the_catalogs_figures() -> None:
    cluster = build({"a100": {**A100, "memory_gib": 10.5, "mfu": 0.5}})
    spec = cluster.nodes[0].device
    assert (spec.memory_bytes, spec.mfu) == (int(10.5 * GIB), 0.5)
    unchanged = build({"a100": {**A100, "memory_gib": None, "mfu": None}}).nodes[0].device
    assert (unchanged.memory_bytes, unchanged.mfu) == (80 * GIB, 0.4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device": "a100"}, r"groups\.g\.device=a100 is not a known device.*Choose from"),
        ({"device": ["t4"]}, r"groups\.g\.device=\['t4'\] is not a known device"),
        ({"num_nodes": -1}, r"groups\.g\.num_nodes=-1 must be a whole number of at least 0"),
        ({"num_nodes": True}, r"groups\.g\.num_nodes=True must be a whole number"),
        ({"num_nodes": 1.5}, r"groups\.g\.num_nodes=1\.5 must be a whole number"),
        ({"devices_per_node": 0}, r"groups\.g\.devices_per_node=0 must be .* at least 1"),
        ({"memory_gib": 0}, r"groups\.g\.memory_gib=0 must be a number greater than 0"),
        ({"memory_gib": float("inf")}, r"groups\.g\.memory_gib=inf must be"),
        ({"memory_gib": "big"}, r"groups\.g\.memory_gib=big must be"),
        ({"mfu": 1.2}, r"groups\.g\.mfu=1\.2 must be a number greater than 0 and at most 1"),
        ({"mfu": float("nan")}, r"groups\.g\.mfu=nan must be"),
        ({"num_node": 3}, r"groups\.g\.num_node is not a known key\. Did you mean 'num_nodes'"),
        ({"num_nodes": 10**6}, r"declares 2000000 devices; at most"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build({"g": {**A100, **fields}})


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build({"a": {**A100, "mfu": 0}, "b": {"device": "h100"}, "c": 3}, intra_link="nvlink33")
    keys = [problem.split("=")[0] for problem in caught.value.problems]
    assert keys == [
        "hardware.intra_link",
        "hardware.groups.a.mfu",
        "hardware.groups.b.device",
        "hardware.groups.b.num_nodes",
        "hardware.groups.b.devices_per_node",
        "hardware.groups.c",
    ]


@pytest.mark.parametrize("groups", [{}, {"a100": {**A100, "num_nodes": 0}}])
def test_an_empty_cluster_is_refused(groups: Any) -> None:
    with pytest.raises(ConfigError, match=r"hardware\.groups has no device"):
        build(groups)
