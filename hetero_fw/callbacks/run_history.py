"""What earlier attempts of a run have shown, read from its event log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_fw.hardware import device
from hetero_fw.monitoring import EventName, committed_saves
from hetero_fw.planning import ParallelPlan
from hetero_fw.policies import (
    PERMANENT,
    AttemptRecord,
    DeviceGroup,
    FailureRates,
    Tier,
    learn_failure_rates,
)


@dataclass(frozen=True, kw_only=True)
class SaveHistory:
    """What committed saves to one tier have taken.

    Attributes:
        costs_s: stall of each; `persist_times_s` what writing it took.
    """

    costs_s: tuple[float, ...] = ()
    persist_times_s: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunHistoryFacts:
    """What earlier attempts of the run have shown.

    Attributes:
        rates: how often each group of devices fails.
        saves: by tier.
    """

    rates: FailureRates
    saves: Mapping[Tier, SaveHistory]


def read_facts(
    events: Sequence[Mapping[str, Any]],
    plan: ParallelPlan,
    prior_mtbf_s: float | Mapping[str, float],
) -> RunHistoryFacts:
    """Costs and failure rates of the devices in `plan`, from the event log of earlier attempts."""
    num_devices = Counter(rank.group for rank in plan.ranks)
    kinds = {rank.group: device(rank.device).kind for rank in plan.ranks}
    groups = [
        DeviceGroup(name=name, kind=kinds[name], num_devices=count)
        for name, count in num_devices.items()
    ]
    return RunHistoryFacts(
        rates=learn_failure_rates(groups, prior_mtbf_s, _attempt_records(events, plan)),
        saves={tier: _save_history(committed_saves(events, tier)) for tier in Tier},
    )


def _save_history(committed: Sequence[Mapping[str, Any]]) -> SaveHistory:
    return SaveHistory(
        costs_s=tuple(e["stall_s"] for e in committed if "stall_s" in e),
        persist_times_s=tuple(e["persist_s"] for e in committed if "persist_s" in e),
    )


def _attempt_records(
    events: Sequence[Mapping[str, Any]], plan: ParallelPlan
) -> list[AttemptRecord]:
    by_attempt: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        by_attempt.setdefault(event["attempt"], []).append(event)
    group_of_node = {rank.node: rank.group for rank in plan.ranks}
    return [_attempt_record(by_attempt[number], group_of_node) for number in sorted(by_attempt)]


def _attempt_record(
    events: Sequence[Mapping[str, Any]], group_of_node: Mapping[str, str]
) -> AttemptRecord:
    """What one attempt says about failures; `group_of_node` is for nodes whose event does not."""
    starts = [e for e in events if e["event"] == EventName.ATTEMPT_START]
    group_of = {
        e["rank"]: e.get("group", group_of_node.get(e["node"], e["device"])) for e in starts
    }
    failures = [
        e
        for e in events
        if e["event"] == EventName.FAILURE_DETECTED and e.get("kind") not in PERMANENT
    ]
    failed_rank = failures[0].get("failed_rank") if failures else None
    node = failures[0].get("node") if failures else None
    first_s = min((e["time_s"] for e in starts), default=events[-1]["time_s"])
    return AttemptRecord(
        duration_s=max(0.0, max(e["time_s"] for e in events) - first_s),
        num_devices=Counter(group_of.values()),
        has_failed=bool(failures),
        failed_group=group_of.get(failed_rank, group_of_node.get(node or "")),
    )
