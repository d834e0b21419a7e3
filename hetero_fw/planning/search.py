"""Which devices train, and how the batch is split among them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hetero_fw.errors import ConfigError
from hetero_fw.hardware import ClusterSpec, Precision, WorkloadProfile
from hetero_fw.planning.assemble import assemble_plan
from hetero_fw.planning.candidates import candidate_counts
from hetero_fw.planning.cost import StepWork, sample_seconds
from hetero_fw.planning.evaluate import (
    Candidate,
    ClassShares,
    Problem,
    balanced_candidate,
    fixed_candidate,
    layouts,
)
from hetero_fw.planning.explain import Decision
from hetero_fw.planning.feasibility import infeasible
from hetero_fw.planning.plan import BatchSplit, ParallelPlan, PlanKind
from hetero_fw.planning.pool import Counts, DevicePool
from hetero_fw.planning.precision import choose_precision
from hetero_fw.planning.request import UNIFORM, PlanRequest

_TIE = 1e-9


def make_plan(
    cluster: ClusterSpec,
    workload: WorkloadProfile,
    request: PlanRequest,
    *,
    has_communication: bool = True,
) -> ParallelPlan:
    """The plan with the least predicted step time that `request` allows.

    Under `auto` it is never slower than the best subset of equal devices or, where that can be
    done, the equal split over all devices; of equally fast plans it takes the one with the most
    devices.

    Args:
        cluster: what there is.
        workload: the model.
        request: what the user asks of the planner.
        has_communication: False if transfers cost nothing, as between emulated devices.

    Raises:
        ConfigError: the request cannot be met on this cluster, whatever the model.
        InfeasiblePlanError: no plan fits the memory; names the tightest device.
    """
    problem = Problem(
        pool=DevicePool.of(cluster),
        work=StepWork.of(workload),
        request=request,
        has_communication=has_communication,
    )
    _check(problem)
    return assemble_plan(problem, _decide(problem), is_estimated=workload.is_estimated)


def _decide(problem: Problem) -> Decision:
    search = _Search(problem)
    split, subsets = _options(problem)
    if split is BatchSplit.GIVEN:
        chosen = fixed_candidate(problem, problem.pool.all_counts, _given_by_class(problem))
    elif split is BatchSplit.UNIFORM:
        chosen = search.uniform()
    else:
        chosen = search.fastest(subsets)
    if chosen is None:
        raise infeasible(problem, subsets)
    uniform = search.uniform()
    return Decision(
        chosen=chosen,
        split=split,
        uniform_step_s=uniform.step_s if uniform else None,
        all_devices_step_s=search.step_s(problem.pool.all_counts),
        best_single_type_step_s=search.best_single_type_step_s(),
    )


def _options(problem: Problem) -> tuple[BatchSplit, list[Counts]]:
    """How the request wants the batch split, and the subsets of devices it leaves open."""
    request, pool = problem.request, problem.pool
    if request.kind == PlanKind.SINGLE:
        return BatchSplit.BY_SPEED, _single_devices(pool)
    if request.given_shares:
        return BatchSplit.GIVEN, [pool.all_counts]
    if request.batch_split == UNIFORM:
        return BatchSplit.UNIFORM, [pool.all_counts]
    if request.kind == PlanKind.FSDP:
        return BatchSplit.BY_SPEED, [pool.all_counts]
    return BatchSplit.BY_SPEED, candidate_counts(pool, request.global_batch_size)


def _single_devices(pool: DevicePool) -> list[Counts]:
    indices = range(len(pool.classes))
    return [tuple(int(other == index) for other in indices) for index in indices]


def _given_by_class(problem: Problem) -> ClassShares:
    members: list[list[int]] = [[] for _ in problem.pool.classes]
    slots = problem.pool.slots(problem.pool.all_counts)
    for slot, share in zip(slots, problem.request.given_shares or (), strict=True):
        members[slot.class_index].append(share)
    return tuple(tuple(shares) for shares in members)


@dataclass
class _Search:
    """Evaluates subsets of the cluster, each at most once."""

    problem: Problem
    _found: dict[Counts, Candidate | None] = field(default_factory=dict)

    def balanced(self, counts: Counts) -> Candidate | None:
        if counts not in self._found:
            self._found[counts] = balanced_candidate(self.problem, counts)
        return self._found[counts]

    def step_s(self, counts: Counts) -> float | None:
        found = self.balanced(counts)
        return found.step_s if found else None

    def fastest(self, subsets: Iterable[Counts]) -> Candidate | None:
        """The best subset. Those that cannot win even with perfect balance are not evaluated."""
        best: Candidate | None = None
        bounded = sorted((self._bound_s(counts), counts) for counts in subsets)
        for bound_s, counts in bounded:
            if best and bound_s > best.step_s * (1 + _TIE):
                break
            found = self.balanced(counts)
            if found and (best is None or _is_better(found, best)):
                best = found
        return best

    def _bound_s(self, counts: Counts) -> float:
        """Step time if nothing but the devices' rates mattered."""
        rate = sum(
            count / min(sample_seconds(entry.device, self.problem.work, p) for p in Precision)
            for entry, count in zip(self.problem.pool.classes, counts, strict=True)
            if count
        )
        return self.problem.request.global_batch_size / rate

    def uniform(self) -> Candidate | None:
        """The stock equal split on all devices; a batch that is not divisible is padded."""
        counts = self.problem.pool.all_counts
        batch = self.problem.request.global_batch_size
        if batch < sum(counts):
            return None
        share = -(-batch // sum(counts))
        shares = tuple((share,) * count for count in counts)
        return fixed_candidate(self.problem, counts, shares)

    def best_single_type_step_s(self) -> float | None:
        """Step time of the best subset of equal devices."""
        pool = self.problem.pool
        subsets = candidate_counts(pool, self.problem.request.global_batch_size)
        best = self.fastest(
            counts for counts in subsets if len({d.name for d in pool.devices(counts)}) == 1
        )
        return best.step_s if best else None


def _is_better(found: Candidate, best: Candidate) -> bool:
    if found.step_s < best.step_s * (1 - _TIE):
        return True
    is_tie = found.step_s <= best.step_s * (1 + _TIE)
    return is_tie and found.num_devices > best.num_devices


def _check(problem: Problem) -> None:
    """Refuse what no model could run with on this cluster."""
    request, pool = problem.request, problem.pool
    devices = [entry.device for entry in pool.classes]
    is_single = request.kind == PlanKind.SINGLE
    if not is_single or not any(list(layouts(problem, one)) for one in _single_devices(pool)):
        choose_precision(devices, request.precision)
    world_size = 1 if is_single else sum(pool.all_counts)
    problems = []
    if request.given_shares is not None and len(request.given_shares) != world_size:
        problems.append(
            f"parallel.batch_split lists {len(request.given_shares)} shares for {world_size} "
            "devices; give one for each device in rank order."
        )
    problems += _batch_problems(request, world_size)
    problems += _microbatch_problems(request, world_size)
    ConfigError.collect(problems)


def _batch_problems(request: PlanRequest, world_size: int) -> Iterable[str]:
    batch, is_uniform = request.global_batch_size, request.batch_split == UNIFORM
    takes_all = is_uniform or request.kind == PlanKind.FSDP
    if takes_all and batch < world_size:
        yield (
            f"data.global_batch_size={batch} is smaller than the number of devices, {world_size}; "
            f"it must be at least {world_size}, or let parallel=auto use fewer devices."
        )
    elif is_uniform and batch % world_size:
        lower = batch // world_size * world_size
        yield (
            f"data.global_batch_size={batch} cannot be split equally among {world_size} devices. "
            f"The nearest valid values are {lower} and {lower + world_size}; "
            "parallel=auto takes any value."
        )


def _microbatch_problems(request: PlanRequest, world_size: int) -> Iterable[str]:
    count, size = request.fixed_num_microbatches, request.max_microbatch_size
    if count is None or size is None:
        return
    share = max(request.given_shares or [-(-request.global_batch_size // world_size)])
    if share > count * size:
        yield (
            f"parallel.num_microbatches={count} of parallel.max_microbatch_size={size} hold "
            f"{count * size} samples, but a device must take {share}. Raise either, or set "
            "parallel.num_microbatches=auto."
        )
