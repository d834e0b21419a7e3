"""The report's tables about checkpoints: what saves cost in each tier, and what went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hetero_fw.monitoring.events import EventName
from hetero_fw.monitoring.history import Row
from hetero_fw.monitoring.quantities import format_bytes, format_duration
from hetero_fw.monitoring.report.tables import or_dash, table
from hetero_fw.monitoring.saves import is_quarantine, saves_by_tier

_MAX_TROUBLES = 100
_TROUBLES = {
    EventName.CHECKPOINT_FAILED: "save failed",
    EventName.CHECKPOINT_REJECTED: "rejected",
    EventName.WRITER_RESTART: "writer restarted",
}


def save_table(events: Sequence[Row]) -> str:
    """A row for each tier; nothing if the run has not saved."""
    rows = [
        [
            escape(tier),
            f"{saves.num_committed:,}",
            f"{saves.num_failed:,}",
            or_dash(saves.stall_s, format_duration),
            or_dash(saves.persist_s, format_duration),
            or_dash(saves.size_bytes, format_bytes),
        ]
        for tier, saves in saves_by_tier(events).items()
    ]
    head = ["tier", "committed", "failed", "median stall", "median time to write", "newest"]
    return table(head, rows, num_text_columns=1) if rows else ""


def trouble_table(events: Sequence[Row]) -> str:
    """The newest saves that failed, checkpoints that were not used and writers that ended."""
    troubles = _troubles(events)
    if not troubles:
        return ""
    start_s = min(event["time_s"] for event in events)
    rows = [
        [
            f"{event['time_s'] - start_s:,.2f}",
            f"{event['attempt']}",
            "" if event.get("step") is None else f"{event['step']:,}",
            escape(str(event.get("tier") or "")),
            "quarantined" if is_quarantine(event) else _TROUBLES[event["event"]],
            escape(str(event.get("message") or event.get("reason") or "")),
        ]
        for event in troubles[-_MAX_TROUBLES:]
    ]
    head = ["time, s", "attempt", "step", "tier", "what", "details"]
    return table(head, rows, num_text_columns=0, first_text_column=3)


def _troubles(events: Sequence[Row]) -> list[Row]:
    """Each once: ranks that cannot ask rank 0 report the failure of a save themselves."""
    found: dict[object, Row] = {}
    for index, event in enumerate(events):
        key: object = index
        if event["event"] == EventName.CHECKPOINT_FAILED:
            key = (event["attempt"], event.get("step"), event.get("tier"))
        if event["event"] in _TROUBLES:
            found.setdefault(key, event)
    return list(found.values())
