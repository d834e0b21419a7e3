"""Plans for clusters whose devices CPU processes of this machine stand in for."""

from __future__ import annotations

from dataclasses import replace

from hetero_fw.errors import ConfigError
from hetero_fw.hardware import ClusterSpec, Precision, WorkloadProfile, emulated_cluster
from hetero_fw.planning.plan import EmulationPlan, ParallelPlan
from hetero_fw.planning.precision import choose_precision
from hetero_fw.planning.predict import predict_step
from hetero_fw.planning.request import AUTO, PlanRequest
from hetero_fw.planning.search import make_plan


def make_emulated_plan(
    cluster: ClusterSpec,
    workload: WorkloadProfile,
    request: PlanRequest,
    *,
    host_flops_per_s: float,
    dilation: float | None = None,
    headroom: float = 2.4,
) -> ParallelPlan:
    """A plan for `cluster` as this machine emulates it; times are seconds of this machine.

    Memory, precision and relative speeds are the declared devices'. Transfers between the
    processes are part of what pacing hides, so they cost nothing here.

    Args:
        cluster: the declared cluster.
        workload: the model.
        request: what the user asks of the planner.
        host_flops_per_s: rate of this machine, all cores together.
        dilation: seconds here for one second on the declared devices. None chooses it so that a
            perfectly balanced step on all devices takes `headroom` times what this machine
            needs to compute it; the choice depends on the cluster, not on the split.
        headroom: at least 1, more if the machine is busy with other things as well.

    Raises:
        ConfigError, InfeasiblePlanError: as `make_plan`.
    """
    problems = [
        f"{key}={value} must be a finite number greater than 0."
        for key, value in (
            ("hardware.emulation.host_flops_per_s", host_flops_per_s),
            ("hardware.emulation.headroom", headroom),
        )
        if not 0 < value < float("inf")
    ]
    ConfigError.collect(problems)
    if dilation is None:
        dilation = headroom * _declared_flops_per_s(cluster, request) / host_flops_per_s
    plan = make_plan(
        emulated_cluster(cluster, dilation), workload, request, has_communication=False
    )
    declared = predict_step(cluster, workload, plan)
    reason = (
        "EMULATED: CPU processes stand in for the declared devices; "
        f"1 s there is {dilation:.4g} s here"
    )
    remark = _better_declared_plan(cluster, workload, request, declared.step_s)
    is_explicit = request.precision != AUTO
    return replace(
        plan,
        compute_precision=plan.precision if is_explicit else Precision.FP32,
        reasons=(reason, *plan.reasons, *remark),
        emulation=EmulationPlan(
            dilation=dilation,
            host_flops_per_s=host_flops_per_s,
            declared_step_s=declared.step_s,
        ),
    )


def _declared_flops_per_s(cluster: ClusterSpec, request: PlanRequest) -> float:
    """Rate of all declared devices together."""
    if request.precision == AUTO:
        precision = choose_precision([node.device for node in cluster.nodes]).precision
    else:
        precision = Precision(request.precision)
    return sum(node.num_devices * node.device.flops_per_s(precision) for node in cluster.nodes)


def _better_declared_plan(
    cluster: ClusterSpec, workload: WorkloadProfile, request: PlanRequest, step_s: float
) -> tuple[str, ...]:
    """A sentence if the real devices would be better off with another plan than this one."""
    other = make_plan(cluster, workload, request)
    if other.step_s > 0.95 * step_s:
        return ()
    return (
        f"on the declared devices, where transfers take real time, another plan is faster: "
        f"{other.world_size} of {cluster.num_devices} devices, {other.step_s:.4g} s a step "
        f"instead of {step_s:.4g} s (hetero plan shows it)",
    )
