"""From the chosen candidate to the plan of every rank."""

from __future__ import annotations

from hetero_fw.planning.cost import Sharding, budget_bytes, busy_seconds, sample_seconds
from hetero_fw.planning.evaluate import Candidate, Layout, Problem
from hetero_fw.planning.explain import Decision, reasons
from hetero_fw.planning.plan import ParallelPlan, PlanKind, RankPlan
from hetero_fw.planning.shares import split_microbatches


def assemble_plan(problem: Problem, decision: Decision, *, is_estimated: bool) -> ParallelPlan:
    """The plan that `decision` describes; says so if the model's costs `is_estimated`."""
    chosen = decision.chosen
    why = list(reasons(problem, decision))
    if is_estimated:
        why.append("model costs: estimated from the number of parameters")
    return ParallelPlan(
        kind=PlanKind.SINGLE if chosen.num_devices == 1 else PlanKind.FSDP,
        batch_split=decision.split,
        global_batch_size=problem.request.global_batch_size,
        precision=chosen.precision,
        compute_precision=chosen.precision,
        zero_stage=chosen.zero_stage,
        ranks=_rank_plans(problem, chosen),
        step_s=chosen.step_s,
        communication_s=chosen.communication_s,
        uniform_step_s=decision.uniform_step_s,
        best_single_type_step_s=decision.best_single_type_step_s,
        idle_devices=_idle_devices(problem, chosen),
        reasons=tuple(why),
    )


def _rank_plans(problem: Problem, chosen: Candidate) -> tuple[RankPlan, ...]:
    nodes = problem.pool.cluster.nodes
    sharding = Sharding(
        zero_stage=chosen.zero_stage,
        world_size=chosen.num_devices,
        precision=chosen.precision,
    )
    layout = Layout(problem=problem, counts=chosen.counts, sharding=sharding)
    shares = [iter(members) for members in chosen.shares]
    ranks = []
    for rank, slot in enumerate(problem.pool.slots(chosen.counts)):
        node = nodes[slot.node_index]
        num_samples = next(shares[slot.class_index])
        microbatches = split_microbatches(num_samples, chosen.num_microbatches)
        each_s = sample_seconds(node.device, problem.work, chosen.precision)
        ranks.append(
            RankPlan(
                rank=rank,
                node=node.name,
                node_index=slot.node_index,
                local_rank=slot.local_rank,
                device=node.device.name,
                group=node.group,
                num_samples=num_samples,
                microbatches=microbatches,
                compute_s=busy_seconds(num_samples, chosen.num_microbatches, each_s),
                # A padding micro-batch holds one sample, as one of a single sample does.
                required_bytes=layout.required_bytes(
                    node.device, max(1, microbatches[0]), chosen.num_microbatches
                ),
                budget_bytes=budget_bytes(node.device, problem.request.memory_margin),
            )
        )
    return tuple(ranks)


def _idle_devices(problem: Problem, chosen: Candidate) -> tuple[str, ...]:
    used = {(slot.node_index, slot.local_rank) for slot in problem.pool.slots(chosen.counts)}
    return tuple(
        f"{node.name}/{local_rank}"
        for index, node in enumerate(problem.pool.cluster.nodes)
        for local_rank in range(node.num_devices)
        if (index, local_rank) not in used
    )
