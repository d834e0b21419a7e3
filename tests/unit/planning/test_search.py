from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_fw.errors import ConfigError, InfeasiblePlanError
from hetero_fw.hardware import GIB, ClusterSpec, Precision, WorkloadProfile
from hetero_fw.planning import BatchSplit, ParallelPlan, PlanKind, PlanRequest, predict_step
from tests.unit.planning.examples import (
    COMPUTE_BOUND,
    DEVICE_NAMES,
    MIX,
    cluster,
    clusters,
    node,
    plan,
    workload,
    workloads,
)

BATCHES = st.integers(1, 40)
REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "max_microbatch_size": st.integers(1, 4),
        "zero_stage": st.sampled_from([2, 3]),
        "batch_split": st.just("auto"),
        "memory_margin": st.sampled_from([0.0, 0.3]),
    },
)


def plan_or_none(*args: Any, **request: Any) -> ParallelPlan | None:
    try:
        return plan(*args, **request)
    except InfeasiblePlanError:
        return None


def test_a100_v100_mix() -> None:
    made = plan(MIX, precision="16-mixed")
    assert made.shares == (23, 23, 9, 9)
    assert [rank.node for rank in made.ranks] == ["a100-0", "a100-0", "v100-0", "v100-0"]
    assert [rank.local_rank for rank in made.ranks] == [0, 1, 0, 1]
    assert made.uniform_step_s is not None
    assert made.uniform_step_s / made.step_s == pytest.approx(1.74, abs=0.01)
    assert made.precision is made.compute_precision is Precision.FP16_MIXED
    assert (made.kind, made.zero_stage, made.num_microbatches) == (PlanKind.FSDP, 2, 1)
    assert made.best_single_type_step_s == pytest.approx(made.step_s * 32 / 23, rel=0.01)


def test_uniform_is_what_auto_compares_with() -> None:
    made = plan(MIX, batch_split="uniform")
    assert made.shares == (16, 16, 16, 16)
    assert made.batch_split is BatchSplit.UNIFORM
    assert made.step_s == made.uniform_step_s == plan(MIX).uniform_step_s


def test_single_takes_the_fastest_device() -> None:
    made = plan(cluster(("v100-32gb", 1, 2), ("a100-80gb", 1, 2)), kind="single")
    assert made.shares == (64,)
    assert (made.kind, made.zero_stage) == (PlanKind.SINGLE, 0)
    assert made.ranks[0].node == "a100-0"
    assert made.idle_devices == ("v100-0/0", "v100-0/1", "a100-0/1")
    assert made.communication_s == 0


def test_given_shares_are_kept_in_rank_order() -> None:
    made = plan(MIX, batch_split=[30, 10, 24, 0], num_microbatches=2)
    assert made.shares == (30, 10, 24, 0)
    assert made.batch_split is BatchSplit.GIVEN
    assert made.ranks[3].microbatches == (0, 0)
    # A padding micro-batch computes a sample that has no weight.
    assert made.ranks[3].compute_s == pytest.approx(made.ranks[2].compute_s / 12)


def test_fsdp_uses_slow_devices_too() -> None:
    mixed = cluster(("h100-80gb", 1, 1), ("cpu", 1, 1))
    assert plan(mixed, kind="fsdp").shares == (63, 1)
    assert plan(mixed, kind="auto").world_size == 1


def test_more_devices_than_samples() -> None:
    made = plan(cluster(("a100-80gb", 1, 4), ("v100-32gb", 1, 4)), global_batch_size=3)
    assert made.shares == (1, 1, 1)
    assert {rank.device for rank in made.ranks} == {"a100-80gb"}
    assert made.uniform_step_s is None


def test_slow_links_leave_devices_idle() -> None:
    made = plan(MIX, workload(flops=1e9, params=50_000_000))
    assert made.world_size < 4
    assert any("idle" in reason for reason in made.reasons)


def test_devices_of_equal_speed_are_all_used() -> None:
    assert plan(cluster(("t4", 2, 2))).shares == (16, 16, 16, 16)


def test_memory_decides_the_microbatches() -> None:
    heavy = workload(flops=1e13, params=10_000, activation_bytes=2 * GIB)
    made = plan(MIX, heavy)
    assert made.num_microbatches == 2
    assert all(rank.required_bytes <= rank.budget_bytes for rank in made.ranks)
    assert made.ranks[0].microbatches == (12, 11)


def test_memory_decides_the_zero_stage() -> None:
    big = workload(num_layers=50, params=100_000_000, flops=1e15)
    eight = cluster(("a100-40gb", 1, 8))
    assert plan(eight, big).zero_stage == 3
    assert plan(cluster(("h200-141gb", 1, 8)), big).zero_stage == 2
    with pytest.raises(InfeasiblePlanError, match=r"parallel\.zero_stage=auto"):
        plan(eight, big, zero_stage=2)


def test_infeasible_names_the_tightest_device_and_by_how_much() -> None:
    huge = workload(num_layers=80, params=1_000_000_000, activation_bytes=0)
    with pytest.raises(InfeasiblePlanError) as caught:
        plan(MIX, huge)
    message = str(caught.value)
    # 16 bytes of state in 4 shards, autocast's copy and two units of 8 bytes.
    needed = (80e9 * 16 / 4 + 80e9 * 2 + 2e9 * 8) / GIB + 1
    assert "v100-32gb on node v100-0" in message
    assert f"needs {needed:.1f} GiB and may use 28.8 GiB" in message
    assert f"{needed - 28.8:.1f} GiB too little" in message
    assert "hardware.groups.v100.num_nodes" in message


def test_a_small_card_does_not_spoil_the_plan() -> None:
    big = workload(num_layers=40, params=100_000_000, flops=1e15)
    made = plan(cluster(("a100-80gb", 1, 4), ("t4", 1, 1)), big)
    assert {rank.device for rank in made.ranks} == {"a100-80gb"}
    assert any("does not fit when they take part" in reason for reason in made.reasons)


def test_planning_for_512_devices_of_four_types_is_exact_in_sum() -> None:
    names = ("h100-80gb", "a100-80gb", "v100-32gb", "t4")
    large = cluster(*((name, 16, 8) for name in names))
    made = plan(large, global_batch_size=8192)
    assert made.world_size == 512
    assert sum(made.shares) == 8192


@pytest.mark.parametrize(
    ("request_fields", "message"),
    [
        (
            {"batch_split": "uniform", "global_batch_size": 30},
            r"data\.global_batch_size=30 cannot be split .* 4 devices.* are 28 and 32",
        ),
        (
            {"batch_split": "uniform", "global_batch_size": 3},
            r"data\.global_batch_size=3 is smaller than the number of devices, 4",
        ),
        ({"kind": "fsdp", "global_batch_size": 3}, r"data\.global_batch_size=3 is smaller"),
        ({"precision": "bf16-mixed"}, r"parallel\.precision=bf16-mixed: v100-32gb"),
        ({"batch_split": [32, 32]}, r"lists 2 shares for 4 devices"),
        ({"num_microbatches": 2, "max_microbatch_size": 3}, r"hold 6 samples, .* must take 16"),
    ],
)
def test_what_this_cluster_cannot_do(request_fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(MIX, **request_fields)


def test_single_may_use_a_precision_that_others_lack() -> None:
    made = plan(MIX, kind="single", precision="bf16-mixed")
    assert made.ranks[0].device == "a100-80gb"
    with pytest.raises(ConfigError, match="t4 cannot compute bf16"):
        plan(cluster(("t4", 1, 2)), kind="single", precision="bf16-mixed")


@given(drawn=clusters(), work=workloads(), batch=BATCHES, request=REQUESTS)
@settings(max_examples=60, deadline=None)
def test_plans_are_consistent(
    drawn: ClusterSpec, work: WorkloadProfile, batch: int, request: dict[str, Any]
) -> None:
    made = plan_or_none(drawn, work, global_batch_size=batch, **request)
    if made is None:
        return
    assert sum(made.shares) == batch
    assert [rank.rank for rank in made.ranks] == list(range(made.world_size))
    slots = [(rank.node_index, rank.local_rank) for rank in made.ranks]
    assert slots == sorted(slots)
    assert made.world_size + len(made.idle_devices) == drawn.num_devices
    for rank in made.ranks:
        assert sum(rank.microbatches) == rank.num_samples
        assert len(rank.microbatches) == made.num_microbatches
        assert rank.required_bytes <= rank.budget_bytes
        assert max(rank.microbatches) <= request.get("max_microbatch_size", batch)
    assert made.step_s == max(rank.compute_s for rank in made.ranks) + made.communication_s
    again = predict_step(drawn, work, made)
    assert again.step_s == pytest.approx(made.step_s, rel=1e-9)
    assert ParallelPlan.from_dict(made.to_dict()) == made


@given(drawn=clusters(), work=workloads(), batch=BATCHES, request=REQUESTS)
@settings(max_examples=60, deadline=None)
def test_auto_is_never_worse(
    drawn: ClusterSpec, work: WorkloadProfile, batch: int, request: dict[str, Any]
) -> None:
    made = plan_or_none(drawn, work, global_batch_size=batch, **request)
    single = plan_or_none(drawn, work, **{**request, "global_batch_size": batch, "kind": "single"})
    others = [made.best_single_type_step_s] if made else []
    others += [single.step_s] if single else []
    for name in {spec.name for spec in drawn.device_types}:
        kept = tuple(n for n in drawn.nodes if n.device.name == name)
        subset = replace(drawn, nodes=kept)
        alone = plan_or_none(subset, work, global_batch_size=batch, **request)
        others += [alone.step_s] if alone else []
    if batch % drawn.num_devices == 0:
        uniform = {**request, "batch_split": "uniform"}
        equal = plan_or_none(drawn, work, global_batch_size=batch, **uniform)
        others += [equal.step_s] if equal else []
    known = [other for other in others if other is not None]
    assert made is not None or not known
    assert made is None or all(made.step_s <= other * (1 + 1e-6) for other in known)


@given(
    drawn=clusters(max_nodes=2),
    work=workloads(),
    batch=BATCHES,
    request=REQUESTS,
    name=st.sampled_from(DEVICE_NAMES),
    in_place=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_one_more_device_never_makes_steps_longer(
    drawn: ClusterSpec,
    work: WorkloadProfile,
    batch: int,
    request: dict[str, Any],
    name: str,
    in_place: bool,
) -> None:
    before = plan_or_none(drawn, work, global_batch_size=batch, **request)
    if in_place:
        first = drawn.nodes[0]
        nodes = (replace(first, num_devices=first.num_devices + 1), *drawn.nodes[1:])
    else:
        nodes = (*drawn.nodes, node(len(drawn.nodes), name, 1))
    larger = replace(drawn, nodes=nodes)
    after = plan_or_none(larger, work, global_batch_size=batch, **request)
    if before is not None:
        assert after is not None
        assert after.step_s <= before.step_s * (1 + 1e-6)


@given(drawn=clusters(), work=workloads(), batch=BATCHES, seed=st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_order_of_nodes_does_not_matter(
    drawn: ClusterSpec, work: WorkloadProfile, batch: int, seed: Any
) -> None:
    shuffled = list(drawn.nodes)
    seed.shuffle(shuffled)
    first = plan_or_none(drawn, work, global_batch_size=batch)
    second = plan_or_none(replace(drawn, nodes=tuple(shuffled)), work, global_batch_size=batch)
    assert (first is None) == (second is None)
    if first and second:
        assert first.step_s == second.step_s
        assert sorted(first.shares) == sorted(second.shares)


@given(name=st.sampled_from(DEVICE_NAMES), nodes=st.integers(1, 3), batch=BATCHES)
@settings(max_examples=40, deadline=None)
def test_identical_devices_get_equal_shares(name: str, nodes: int, batch: int) -> None:
    made = plan(cluster((name, nodes, 2)), COMPUTE_BOUND, global_batch_size=batch)
    assert max(made.shares) - min(made.shares) <= 1


@given(drawn=clusters(max_nodes=2, max_devices=2), work=workloads(), batch=st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_no_split_of_one_microbatch_beats_the_plan(
    drawn: ClusterSpec, work: WorkloadProfile, batch: int
) -> None:
    made = plan_or_none(drawn, work, global_batch_size=batch)
    if made is None or batch < drawn.num_devices:
        return
    splits = itertools.product(range(1, batch + 1), repeat=drawn.num_devices - 1)
    for split in itertools.islice(splits, 300):
        shares = [*split, batch - sum(split)]
        if shares[-1] >= 1:
            other = plan_or_none(drawn, work, global_batch_size=batch, batch_split=shares)
            assert other is None or made.step_s <= other.step_s * (1 + 1e-6)


def test_plans_are_reproducible() -> None:
    first, second = plan(MIX), plan(MIX)
    assert first == second
    assert first.fingerprint() == second.fingerprint()
    assert ParallelPlan.from_dict(first.to_dict()).fingerprint() == first.fingerprint()
    assert plan(MIX, global_batch_size=65).fingerprint() != first.fingerprint()
    assert math.isfinite(first.samples_per_s)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "fdsp"}, r"parallel\.kind=fdsp is not known\. Did you mean 'fsdp'"),
        ({"batch_split": "unifrm"}, r"parallel\.batch_split=unifrm.*Did you mean 'uniform'"),
        ({"batch_split": [1, -1]}, r"parallel\.batch_split=\[1, -1\] must list whole numbers"),
        ({"batch_split": [1, 2]}, r"sums to 3; it must sum to data\.global_batch_size=8"),
        ({"num_microbatches": 0}, r"parallel\.num_microbatches=0 must be a whole number"),
        ({"num_microbatches": 9}, r"parallel\.num_microbatches=9 must be at most .*=8"),
        ({"max_microbatch_size": 0}, r"parallel\.max_microbatch_size=0 must be"),
        ({"zero_stage": 1}, r"parallel\.zero_stage=1 is not known\. Choose from: auto, 2, 3"),
        ({"precision": "bf16"}, r"parallel\.precision=bf16 is not known\. Did you mean"),
        ({"memory_margin": 1.0}, r"parallel\.memory_margin=1\.0 must be at least 0 and below 1"),
        ({"global_batch_size": 0}, r"data\.global_batch_size=0 must be a whole number"),
    ],
)
def test_requests_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlanRequest(**{"global_batch_size": 8, **fields})


def test_all_problems_of_a_request_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        PlanRequest(global_batch_size=8, kind="x", zero_stage=7, precision="y")
    assert len(caught.value.problems) == 3
