from __future__ import annotations

from typing import Any

import pytest

from hetero_fw.errors import ConfigError
from hetero_fw.hardware import Precision
from hetero_fw.planning import ParallelPlan, PlanRequest, make_emulated_plan
from tests.unit.planning.examples import MIX, plan, workload

WORK = workload(flops=1e9)
HOST_FLOPS_PER_S = 1e11


def emulated(dilation: float | None = None, headroom: float = 1.6, **request: Any) -> ParallelPlan:
    return make_emulated_plan(
        MIX,
        WORK,
        PlanRequest(**{"global_batch_size": 64, **request}),
        host_flops_per_s=HOST_FLOPS_PER_S,
        dilation=dilation,
        headroom=headroom,
    )


def test_a_balanced_step_leaves_the_host_headroom() -> None:
    made = emulated()
    host_s = 64 * WORK.flops_per_sample / HOST_FLOPS_PER_S
    assert made.shares == (23, 23, 9, 9)
    # Whole samples cannot be balanced perfectly: 23 / 22.85.
    assert made.step_s == pytest.approx(1.6 * host_s, rel=0.01)
    assert made.communication_s == 0
    assert made.step_s == max(rank.compute_s for rank in made.ranks)


def test_every_split_is_emulated_at_the_same_speed() -> None:
    auto, uniform, single = (
        emulated(),
        emulated(batch_split="uniform"),
        emulated(kind="single"),
    )
    assert auto.emulation is not None
    assert uniform.emulation is not None
    assert single.emulation is not None
    assert auto.emulation.dilation == uniform.emulation.dilation == single.emulation.dilation
    assert uniform.step_s / auto.step_s == pytest.approx(1.736, abs=0.001)
    assert auto.uniform_step_s == uniform.step_s


def test_ranks_compute_in_fp32_unless_told_otherwise() -> None:
    assert emulated().precision is Precision.FP16_MIXED
    assert emulated().compute_precision is Precision.FP32
    explicit = emulated(precision="16-mixed")
    assert explicit.compute_precision is explicit.precision is Precision.FP16_MIXED


def test_the_declared_devices_step_is_kept_beside_it() -> None:
    made, declared = emulated(dilation=1000.0), plan(MIX, WORK, batch_split=[23, 23, 9, 9])
    assert made.emulation is not None
    assert made.emulation.dilation == 1000.0
    assert made.emulation.host_flops_per_s == HOST_FLOPS_PER_S
    assert made.emulation.declared_step_s == pytest.approx(declared.step_s)
    assert made.step_s == pytest.approx(1000 * (declared.step_s - declared.communication_s))
    assert made.ranks[0].budget_bytes == declared.ranks[0].budget_bytes


def test_the_plan_says_that_it_is_emulated_and_survives_a_round_trip() -> None:
    made = emulated()
    assert made.reasons[0].startswith("EMULATED")
    assert ParallelPlan.from_dict(made.to_dict()) == made


def test_bad_figures_are_named() -> None:
    with pytest.raises(ConfigError, match=r"hardware\.emulation\.dilation=0"):
        emulated(dilation=0.0)
    with pytest.raises(ConfigError, match=r"hardware\.emulation\.headroom=-1"):
        emulated(headroom=-1.0)
