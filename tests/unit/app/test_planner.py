"""From a configuration to a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from omegaconf import DictConfig

from hetero_fw.app import compose_checked
from hetero_fw.app.planner import cluster_of, is_emulated, plan_for, request_of, workload_of
from hetero_fw.errors import ConfigError, InfeasiblePlanError
from hetero_fw.hardware import Precision
from hetero_fw.planning import BatchSplit

MIX = "hardware=a100_v100_mix"


def config(*overrides: str) -> DictConfig:
    return compose_checked(list(overrides))


def test_groups_become_nodes() -> None:
    cfg = config(MIX, "hardware.groups.a100.num_nodes=2", "hardware.groups.v100.memory_gib=16")
    nodes = {node.name: node for node in cluster_of(cfg).nodes}
    assert list(nodes) == ["a100-0", "a100-1", "v100-0"]
    assert nodes["v100-0"].device.memory_bytes == 16 * 2**30


def test_this_machine_is_probed_only_where_nothing_is_declared() -> None:
    assert [node.group for node in cluster_of(config("hardware=local")).nodes] == ["local"]


def test_a_prior_for_a_group_that_this_machine_has_not() -> None:
    assert plan_for(config("ckpt.prior_mtbf_s={local: 3600}")).world_size >= 1
    with pytest.raises(ConfigError, match=r"prior_mtbf_s\.locl is not .* found .*: local\."):
        plan_for(config("ckpt.prior_mtbf_s={locl: 3600}"))


def test_emulation() -> None:
    declared = cluster_of(config(MIX))
    if not is_emulated(config(MIX), declared):
        pytest.skip("this machine has two A100 and two V100")
    with pytest.raises(ConfigError, match=r"a100-80gb of node a100-0.*v100-32gb of node v100-0"):
        is_emulated(config(MIX, "hardware.emulate=never"), declared)
    assert is_emulated(config("hardware.emulate=always"), cluster_of(config()))


def test_declared_cpus_are_there() -> None:
    cfg = config("hardware.probe=false", "+hardware.groups.x.device=cpu")
    assert not is_emulated(cfg, cluster_of(cfg))
    assert plan_for(cfg).emulation is None


def test_request_is_what_the_user_asks() -> None:
    request = request_of(
        config(
            MIX,
            "parallel.batch_split=[20,20,8,8]",
            "parallel.num_microbatches=2",
            "parallel.zero_stage=3",
            "parallel.precision=16-mixed",
        )
    )
    assert request.batch_split == (20, 20, 8, 8)
    assert request.num_microbatches == 2
    assert request.zero_stage == 3
    assert request.precision == "16-mixed"


def test_plan_is_a_function_of_the_configuration() -> None:
    first = plan_for(config(MIX), host_flops_per_s=1e10)
    assert plan_for(config(MIX), host_flops_per_s=1e10) == first
    assert first.batch_split is BatchSplit.BY_SPEED
    assert first.emulation is not None
    assert first.precision is Precision.FP16_MIXED
    assert first.compute_precision is Precision.FP32


def test_rate_that_is_configured_beats_the_one_of_an_earlier_run() -> None:
    cfg = config(MIX, "hardware.emulation.host_flops_per_s=2e10")
    emulation = plan_for(cfg, host_flops_per_s=1e10).emulation
    assert emulation is not None
    assert emulation.host_flops_per_s == 2e10


def test_declared_devices_are_planned_without_being_there() -> None:
    cfg = config(MIX, "mode=plan", "hardware.emulate=never")
    assert plan_for(cfg).emulation is None


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(InfeasiblePlanError, match="v100"):
        plan_for(config(MIX, "parallel=uniform", "hardware.groups.v100.memory_gib=0.5"))


def test_stated_workload_and_estimated_one() -> None:
    stated = workload_of(config())
    estimated = workload_of(config("model.workload=null"))
    assert not stated.is_estimated
    assert estimated.is_estimated
    assert estimated.num_params == pytest.approx(stated.num_params, rel=0.02)
    assert replace(estimated, is_estimated=False).name == "GPTModule"


def test_workload_of_the_wrong_kind() -> None:
    cfg = config("model.workload={_target_:builtins.dict}")
    with pytest.raises(ConfigError, match="returned dict"):
        workload_of(cfg)
