from __future__ import annotations

from hetero_fw.planning import PlanRequest, format_plan, make_emulated_plan, plan_grid
from tests.unit.planning.examples import COMPUTE_BOUND, MIX, cluster, plan, workload

GOLDEN = """\
Plan: fsdp on 4 ranks, ZeRO stage 2, 64 samples a step split by speed, precision 16-mixed
EMULATED: CPU processes stand in for the declared devices and compute in 32-true; times are \
seconds of this machine (1000 for 1 s on the declared devices)
Model: example, 4,000,000 parameters, 4e+09 FLOP a sample

rank  node    device     samples  micro-batches  compute s  memory GiB  budget GiB
   0  a100-0  a100-80gb       23  2x8 1x7           0.7372        1.07       72.00
   1  a100-0  a100-80gb       23  2x8 1x7           0.7372        1.07       72.00
   2  v100-0  v100-32gb        9  3x3                 0.72        1.06       28.80
   3  v100-0  v100-32gb        9  3x3                 0.72        1.06       28.80

step time:           0.7372 s; 86.82 samples/s
equal split on all:  1.28 s; this plan is 1.74 x as fast
best single type:    1.026 s; this plan is 1.39 x as fast
on declared devices: 0.002687 s predicted

Reasons
- EMULATED: CPU processes stand in for the declared devices; 1 s there is 1000 s here
- precision 16-mixed: every device computes fp16 natively; v100-32gb without native bf16
- batch: 23 on each a100-80gb, 9 on each v100-32gb, in proportion to speed
- ZeRO stage 2: gathered parameters fit and are gathered only once a step
- micro-batches: 3, set by parallel.num_microbatches
- communication: hidden by the pacing of emulated devices
- on the declared devices, where transfers take real time, another plan is faster: \
2 of 4 devices, 0.001042 s a step instead of 0.002687 s (hetero plan shows it)"""


def test_golden_plan() -> None:
    work = workload(flops=1e9)
    made = make_emulated_plan(
        MIX,
        work,
        PlanRequest(global_batch_size=64, num_microbatches=3),
        host_flops_per_s=1e11,
        dilation=1000.0,
    )
    assert format_plan(made, work) == GOLDEN


def test_grid_shows_ranks_by_microbatches() -> None:
    made = plan(MIX, num_microbatches=4)
    assert plan_grid(made) == "0: 6 6 6 5\n1: 6 6 6 5\n2: 3 2 2 2\n3: 3 2 2 2"


def test_idle_devices_and_missing_comparisons_are_told() -> None:
    text = format_plan(plan(cluster(("a100-80gb", 1, 4)), global_batch_size=2))
    assert "idle devices:        a100-0/2, a100-0/3" in text
    assert "equal split on all:  not possible" in text
    assert "EMULATED" not in text


def test_a_large_plan_has_a_row_for_each_run_of_equal_ranks() -> None:
    made = plan(cluster(("a100-80gb", 8, 8)), COMPUTE_BOUND, global_batch_size=64)
    lines = format_plan(made).splitlines()
    assert sum("a100-80gb" in line and "1x1" in line for line in lines) == 8
    assert any(line.startswith("56-63  a100-7") for line in lines)
