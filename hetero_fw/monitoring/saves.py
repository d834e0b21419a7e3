"""What became of the saves of a run, worked out from its event log, tier by tier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetero_fw.monitoring.events import EventName
from hetero_fw.monitoring.history import Row
from hetero_fw.monitoring.speed import median_of

# Where events do not say; runs had one tier once.
_STORAGE = "storage"
_QUARANTINED = "quarantined"


@dataclass(frozen=True, kw_only=True)
class TierSaves:
    """Saves to one tier.

    Attributes:
        stall_s: median of what training stood still for one; 0 for the storage behind a nearer
            tier, None if no event says.
        persist_s: median time from the end of staging, or from the commit in the nearer tier.
        size_bytes: of the newest one.
    """

    num_committed: int = 0
    num_failed: int = 0
    stall_s: float | None = None
    persist_s: float | None = None
    size_bytes: int | None = None


def saves_by_tier(events: Sequence[Row]) -> dict[str, TierSaves]:
    """Saves to each tier that the run has used, the nearest first."""
    tiers = {tier_of(event) for event in events if _is_end_of_save(event)}
    return {tier: _saves_to(tier, events) for tier in sorted(tiers)}


def num_committed_saves(events: Iterable[Row]) -> int:
    """Checkpoints that were committed; one that went to several tiers counts once."""
    return len(
        _saves(event for event in events if event["event"] == EventName.CHECKPOINT_COMMITTED)
    )


def committed_saves(events: Iterable[Row], tier: str) -> list[Row]:
    """The events of the saves to `tier` that were committed."""
    return [
        event
        for event in events
        if event["event"] == EventName.CHECKPOINT_COMMITTED and tier_of(event) == tier
    ]


def quarantined_steps(events: Iterable[Row]) -> list[int]:
    """Steps of checkpoints that an attempt passed over because training diverges after them."""
    steps = {event.get("step") for event in events if is_quarantine(event)}
    return sorted(step for step in steps if step is not None)


def rejected_steps(events: Sequence[Row]) -> set[int]:
    """Steps of checkpoints that the last attempt found unusable, wherever it looked for them.

    One that it went on from all the same had a sound copy elsewhere; one that it saved is another.
    """
    last = max((event["attempt"] for event in events), default=0)
    own = [event for event in events if event["attempt"] == last]

    def steps(*names: EventName) -> set[int]:
        return {event["step"] for event in own if event["event"] in names and "step" in event}

    sound = steps(EventName.RESTORED, EventName.CHECKPOINT_COMMITTED)
    return steps(EventName.CHECKPOINT_REJECTED) - sound


def is_quarantine(event: Row) -> bool:
    """Whether it tells of a checkpoint that is sound and passed over all the same."""
    is_rejection = event["event"] == EventName.CHECKPOINT_REJECTED
    return is_rejection and _QUARANTINED in str(event.get("reason"))


def tier_of(event: Row) -> str:
    """The tier that the end of a save is about."""
    return str(event.get("tier") or _STORAGE)


def _is_end_of_save(event: Row) -> bool:
    return event["event"] in (EventName.CHECKPOINT_COMMITTED, EventName.CHECKPOINT_FAILED)


def _saves_to(tier: str, events: Sequence[Row]) -> TierSaves:
    own = [event for event in events if _is_end_of_save(event) and tier_of(event) == tier]
    committed = committed_saves(own, tier)
    failed = [event for event in own if event["event"] == EventName.CHECKPOINT_FAILED]
    sizes = _values(committed, "bytes")
    return TierSaves(
        num_committed=len(_saves(committed)),
        num_failed=len(_saves(failed)),
        stall_s=median_of(_values(committed, "stall_s")),
        persist_s=median_of(_values(committed, "persist_s")),
        size_bytes=int(sizes[-1]) if sizes else None,
    )


def _saves(events: Iterable[Row]) -> set[tuple[int, int | None]]:
    return {(event["attempt"], event.get("step")) for event in events}


def _values(events: Iterable[Row], name: str) -> list[float]:
    values = [event.get(name) for event in events]
    return [value for value in values if isinstance(value, int | float)]
