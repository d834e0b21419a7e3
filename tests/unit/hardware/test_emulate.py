from __future__ import annotations

import pytest

from hetero_fw.errors import ConfigError
from hetero_fw.hardware import ClusterSpec, Precision, build_cluster, emulated_cluster


def declared() -> ClusterSpec:
    return build_cluster(
        name="mix",
        groups={
            "a100": {"device": "a100-80gb", "num_nodes": 1, "devices_per_node": 2},
            "v100": {"device": "v100-32gb", "num_nodes": 1, "devices_per_node": 2},
        },
        intra_link="nvlink3",
        inter_link="eth_25g",
    )


def test_rates_shrink_alike_and_memory_stays() -> None:
    before, after = declared(), emulated_cluster(declared(), 100.0)
    for old, new in zip(before.nodes, after.nodes, strict=True):
        assert (new.name, new.num_devices) == (old.name, old.num_devices)
        assert new.device.memory_bytes == old.device.memory_bytes
        assert new.intra_link.name == new.inter_link.name == "host"
        for precision in Precision:
            slower = old.device.flops_per_s(precision) / new.device.flops_per_s(precision)
            assert slower == pytest.approx(100.0)


@pytest.mark.parametrize("dilation", [0.0, -1.0, float("inf"), float("nan")])
def test_dilation_must_be_positive_and_finite(dilation: float) -> None:
    with pytest.raises(ConfigError, match=r"hardware\.emulation\.dilation"):
        emulated_cluster(declared(), dilation)
