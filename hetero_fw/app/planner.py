"""From a configuration to a plan. No torch: a laptop answers in a second."""

from __future__ import annotations

from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from hetero_fw.errors import ConfigError, did_you_mean
from hetero_fw.hardware import ClusterSpec, DeviceKind, WorkloadProfile, build_cluster
from hetero_fw.planning import ParallelPlan, PlanRequest, make_emulated_plan, make_plan
from hetero_fw.profiling import (
    match_device,
    probe_cuda_devices,
    probe_host_flops,
    probe_local_groups,
)


def cluster_of(cfg: DictConfig) -> ClusterSpec:
    """The declared cluster; `hardware=local` declares what this machine has."""
    hardware = OmegaConf.to_container(cfg.hardware, resolve=True)
    assert isinstance(hardware, dict)
    groups = hardware["groups"]
    if hardware["probe"] and not groups:
        groups = probe_local_groups()
    return build_cluster(
        name=hardware["name"],
        groups=groups,
        intra_link=hardware["intra_link"],
        inter_link=hardware["inter_link"],
        planning_only=hardware["planning_only"],
        notes=hardware["notes"],
    )


def is_emulated(cfg: DictConfig, cluster: ClusterSpec) -> bool:
    """Whether CPU processes have to stand in for the declared devices.

    Declared CPUs are there on every machine: each is a process.

    Raises:
        ConfigError: `hardware.emulate=never` and devices are missing.
    """
    if cfg.hardware.emulate == "always":
        return True
    missing = _missing_devices(cluster)
    if not missing:
        return False
    if cfg.hardware.emulate == "never":
        raise ConfigError(
            f"hardware.emulate=never, but this machine lacks {', '.join(missing)}. Use "
            "hardware=local for what is here, or hardware.emulate=auto to emulate the rest."
        )
    return True


def _missing_devices(cluster: ClusterSpec) -> list[str]:
    present: dict[str, int] = {}
    if any(node.device.kind is not DeviceKind.CPU for node in cluster.nodes):
        for name in map(match_device, probe_cuda_devices()):
            present[name or "unknown"] = present.get(name or "unknown", 0) + 1
    missing = []
    for node in cluster.nodes:
        if node.device.kind is DeviceKind.CPU:
            continue
        have = present.pop(node.device.name, 0)
        if have < node.num_devices:
            missing.append(f"{node.num_devices - have} x {node.device.name} of node {node.name}")
        elif have > node.num_devices:
            present[node.device.name] = have - node.num_devices
    return missing


def _check_prior(cfg: DictConfig, cluster: ClusterSpec) -> None:
    """Groups that are found rather than declared are known only here."""
    prior_s, groups = cfg.ckpt.prior_mtbf_s, dict.fromkeys(node.group for node in cluster.nodes)
    if cfg.hardware.probe and isinstance(prior_s, DictConfig):
        ConfigError.collect(
            f"ckpt.prior_mtbf_s.{name} is not a hardware group.{did_you_mean(name, groups)} "
            f"Groups found on this machine: {', '.join(groups)}."
            for name in map(str, prior_s)
            if name not in groups
        )


def workload_of(cfg: DictConfig) -> WorkloadProfile:
    """The model's costs: as its configuration states them, else estimated from its parameters."""
    if cfg.model.workload is not None:
        workload = instantiate(cfg.model.workload, _convert_="all")
        if not isinstance(workload, WorkloadProfile):
            raise ConfigError(
                "model.workload must be a function that returns a WorkloadProfile; "
                f"{cfg.model.workload._target_} returned {type(workload).__name__}."
            )
        return workload
    # Only a model without a stated workload needs torch to be planned for.
    from hetero_fw.app.estimate import estimate_workload

    return estimate_workload(instantiate(cfg.model.module, _convert_="all"))


def request_of(cfg: DictConfig) -> PlanRequest:
    """What the user asks of the planner."""
    parallel: Any = OmegaConf.to_container(cfg.parallel, resolve=True)
    split = parallel["batch_split"]
    return PlanRequest(
        global_batch_size=cfg.data.global_batch_size,
        kind=parallel["kind"],
        batch_split=tuple(split) if isinstance(split, list) else split,
        num_microbatches=parallel["num_microbatches"],
        max_microbatch_size=parallel["max_microbatch_size"],
        zero_stage=parallel["zero_stage"],
        precision=parallel["precision"],
        memory_margin=parallel["memory_margin"],
    )


def plan_for(
    cfg: DictConfig,
    workload: WorkloadProfile | None = None,
    *,
    host_flops_per_s: float | None = None,
) -> ParallelPlan:
    """The plan that a run with this configuration has on this machine.

    With `hardware.emulate=never` the declared devices are planned for, present or not: only
    training needs them here.

    Args:
        workload: what `workload_of` returned, if it was called already.
        host_flops_per_s: rate of this machine that emulation is paced for where it is not
            configured; measured if None.

    Raises:
        ConfigError: no plan is possible, or a key names a group that is not there.
    """
    cluster = cluster_of(cfg)
    _check_prior(cfg, cluster)
    workload, request = workload or workload_of(cfg), request_of(cfg)
    is_declared_plan = cfg.hardware.emulate == "never" or cluster.planning_only
    if is_declared_plan or not is_emulated(cfg, cluster):
        return make_plan(cluster, workload, request)
    emulation = cfg.hardware.emulation
    if emulation.host_flops_per_s != "auto":
        host_flops_per_s = float(emulation.host_flops_per_s)
    return make_emulated_plan(
        cluster,
        workload,
        request,
        host_flops_per_s=host_flops_per_s or probe_host_flops(),
        dilation=None if emulation.dilation == "auto" else float(emulation.dilation),
        headroom=emulation.headroom,
    )
