from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_fw.hardware import GIB, DeviceKind, Precision, link
from hetero_fw.planning.cost import Ring, Sharding, StepWork, busy_seconds, exposed_seconds
from hetero_fw.planning.pool import DevicePool
from tests.unit.planning.examples import cluster, workload

WORK = StepWork.of(workload(num_layers=4, params=1_000_000))
P = 4_000_000
L = 1_000_000


def sharding(stage: int, world_size: int, precision: Precision = Precision.FP32) -> Sharding:
    return Sharding(zero_stage=stage, world_size=world_size, precision=precision)


@pytest.mark.parametrize(
    ("given_sharding", "is_accumulating", "expected"),
    [
        # parameters, gradients and two Adam moments: 16 bytes each
        (sharding(0, 1), False, 16 * P),
        (sharding(0, 1, Precision.FP16_MIXED), False, 16 * P + 2 * P),
        (sharding(2, 4), False, 4 * P + 4 * P + 8 * L),
        (sharding(2, 4), True, 4 * P + 4 * P + 4 * P),
        (sharding(3, 4), True, 4 * P + 16 * L),
        (sharding(3, 4, Precision.BF16_MIXED), True, 4 * P + 2 * P + 16 * L),
    ],
)
def test_fixed_memory(given_sharding: Sharding, is_accumulating: bool, expected: int) -> None:
    found = given_sharding.fixed_bytes(WORK, DeviceKind.CUDA, is_accumulating=is_accumulating)
    assert found == expected + GIB


def test_a_padding_microbatch_costs_one_sample() -> None:
    assert busy_seconds(8, 4, 0.5) == 4.0
    assert busy_seconds(1, 4, 0.5) == 2.0


def test_ring_moves_nearly_all_bytes_over_the_slowest_link() -> None:
    pool = DevicePool.of(cluster(("a100-80gb", 2, 4)))
    ring = pool.ring((8,))
    ethernet, nvlink = link("eth_100g"), link("nvlink3")
    assert ring.bytes_per_s == ethernet.bytes_per_s
    assert ring.latency_s == pytest.approx(6 * nvlink.latency_s + 2 * ethernet.latency_s)
    assert ring.collective_s(8e9) == pytest.approx(7 * (1e9 / 12.5e9) + 7 / 8 * ring.latency_s)


def test_devices_of_one_node_do_not_touch_its_nic() -> None:
    pool = DevicePool.of(cluster(("a100-80gb", 2, 4)))
    assert pool.ring((4,)).bytes_per_s == link("nvlink3").bytes_per_s


def test_only_exposed_communication_counts() -> None:
    ring = Ring(world_size=2, bytes_per_s=1e9, latency_s=0.0)
    gather_s = 0.5 * 4 * P / 1e9
    ends_s = 0.5 * 2 * 4 * L / 1e9

    def exposed_s(stage: int, count: int, compute_s: float) -> float:
        return exposed_seconds(
            WORK, sharding(stage, 2), ring, num_microbatches=count, compute_s=compute_s
        )

    assert exposed_s(2, 1, 0.0) == pytest.approx(2 * gather_s)
    assert exposed_s(3, 2, 0.0) == pytest.approx(6 * gather_s)
    assert exposed_s(2, 1, 100.0) == pytest.approx(ends_s)
    assert exposed_s(3, 2, 100.0) == pytest.approx(ends_s)
    # A third of 3 gathers hides the forward pass's; backward has more time than it needs.
    assert exposed_s(2, 1, 1.5 * gather_s) == pytest.approx(ends_s)
    assert exposed_s(2, 2, 1.5 * gather_s) == pytest.approx(1.25 * gather_s)


@given(
    stage=st.sampled_from([2, 3]),
    count=st.integers(1, 5),
    compute=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
@settings(deadline=None)
def test_less_compute_never_makes_a_longer_step(
    stage: int, count: int, compute: tuple[float, float]
) -> None:
    ring = Ring(world_size=4, bytes_per_s=1e8, latency_s=1e-5)
    step_s = [
        compute_s
        + exposed_seconds(
            WORK, sharding(stage, 4), ring, num_microbatches=count, compute_s=compute_s
        )
        for compute_s in sorted(compute)
    ]
    assert step_s[0] <= step_s[1] + 1e-12
