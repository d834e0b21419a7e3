"""What the event log of earlier attempts says about costs and failures."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_fw.callbacks import SaveHistory, read_facts
from hetero_fw.policies import Tier
from tests.unit.planning.examples import plan

PLAN = plan()
GROUPS = list(dict.fromkeys(rank.group for rank in PLAN.ranks))
HOUR_S = 3600.0


def event(attempt: int, time_s: float, name: str, **fields: Any) -> dict[str, Any]:
    return {"attempt": attempt, "time_s": time_s, "rank": None, "event": name, **fields}


def attempt(number: int, **failure: Any) -> list[dict[str, Any]]:
    """An hour of all ranks, ended by a failure if it has fields."""
    start_s = number * 2 * HOUR_S
    starts = [
        event(number, start_s, "attempt_start", node=rank.node, device=rank.device)
        | {"rank": rank.rank, "group": rank.group}
        for rank in PLAN.ranks
    ]
    name = "failure_detected" if failure else "attempt_end"
    return [*starts, event(number, start_s + HOUR_S, name, **failure)]


def mtbf_s(events: list[dict[str, Any]]) -> float:
    return read_facts(events, PLAN, 10_800.0).rates.estimate(0.0).mtbf_s


def test_a_fresh_run_has_the_prior() -> None:
    facts = read_facts([], PLAN, 10_800.0)
    assert facts.rates.estimate(0.0).mtbf_s == pytest.approx(10_800.0)
    assert facts.saves[Tier.STORAGE] == SaveHistory()


def test_costs_of_committed_saves_are_read() -> None:
    events = [
        event(0, 1.0, "checkpoint_committed", step=1, stall_s=0.5, persist_s=2.0),
        event(0, 2.0, "checkpoint_failed", step=2, stall_s=9.0),
        event(1, 3.0, "checkpoint_committed", step=3),
        event(1, 4.0, "checkpoint_committed", step=4, stall_s=0.1, persist_s=0.2, tier="local"),
    ]
    facts = read_facts(events, PLAN, 10_800.0)
    assert facts.saves[Tier.STORAGE] == SaveHistory(costs_s=(0.5,), persist_times_s=(2.0,))
    assert facts.saves[Tier.LOCAL] == SaveHistory(costs_s=(0.1,), persist_times_s=(0.2,))


@pytest.mark.parametrize("has_group", [True, False])
def test_the_group_of_the_failed_rank_is_blamed(has_group: bool) -> None:
    failed = PLAN.ranks[-1]
    events = attempt(0, failed_rank=failed.rank, node=failed.node, kind="process_killed")
    if not has_group:  # as logs had it before, the node tells
        events = [{k: v for k, v in e.items() if k != "group"} for e in events]
    rates = read_facts(events, PLAN, 10_800.0).rates.rates(0.0)
    assert rates[failed.group] == max(rates.values())
    assert len(set(rates.values())) == len(GROUPS) > 1


def test_time_between_attempts_is_no_exposure() -> None:
    failure = {"failed_rank": 0, "node": PLAN.ranks[0].node, "kind": "exception"}
    events = [e for number in range(60) for e in attempt(number, **failure)]
    assert mtbf_s(events) == pytest.approx(HOUR_S, rel=1e-3)


def test_attempts_that_end_well_make_failures_rarer() -> None:
    assert mtbf_s(attempt(0)) > 10_800.0


@pytest.mark.parametrize("kind", ["configuration", "out_of_memory"])
def test_what_is_wrong_with_the_job_says_nothing_about_the_cluster(kind: str) -> None:
    failure = {"failed_rank": 0, "node": PLAN.ranks[0].node, "kind": kind}
    assert mtbf_s(attempt(0, **failure)) == mtbf_s(attempt(0))


def test_an_attempt_that_never_started_counts_as_a_failure() -> None:
    events = [event(0, 5.0, "failure_detected", failed_rank=0, node="gone", kind="agent_lost")]
    assert mtbf_s(events) < 10_800.0
