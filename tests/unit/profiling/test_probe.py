"""Names that drivers report lead to the right entry of the catalog, or to none."""

from __future__ import annotations

import pytest

from hetero_fw.hardware import DEVICES
from hetero_fw.profiling import match_device, probe_host_flops, probe_local_groups


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("A100-PCIE-40GB", "a100-40gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla V100-PCIE-32GB", "v100-32gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-80gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10", "a10"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        # Near misses are other devices.
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("NVIDIA A16", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA T400 4GB", None),
        ("NVIDIA RTX A4000", None),
        ("Quadro GV100", None),
        ("NVIDIA B200", None),
        ("", None),
    ],
)
def test_match_device(name: str, key: str | None) -> None:
    assert match_device(name) == key
    assert key is None or key in DEVICES


def test_memory_decides_where_the_name_does_not() -> None:
    assert match_device("Tesla V100", memory_gib=31.7) == "v100-32gb"
    assert match_device("Tesla V100", memory_gib=15.8) == "v100-16gb"


def test_host_rate_is_a_rate() -> None:
    assert probe_host_flops() > 1e8


def test_this_machine_is_a_group() -> None:
    (group,) = probe_local_groups().values()
    assert group["device"] in DEVICES
    assert group["num_nodes"] == 1
    assert group["devices_per_node"] >= 1
