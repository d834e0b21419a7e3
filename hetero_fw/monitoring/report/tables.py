"""The report's headline figures and tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from hetero_fw.monitoring.events import EventName
from hetero_fw.monitoring.history import Row
from hetero_fw.monitoring.quantities import (
    format_bytes,
    format_duration,
    format_number,
    format_rate,
)

_MAX_EVENTS, _MAX_FIELD_CHARS, _MAX_VALUES = 400, 400, 4
_EVENT_FIELDS = frozenset({"time_s", "attempt", "rank", "step", "event"})


def headline(summary: Row) -> str:
    """Figures that one wants to see first."""
    tiles = [
        ("steps", f"{summary['steps']:,}", f"{summary['num_samples']:,} samples"),
        ("loss", *_loss(summary)),
        ("samples/s", or_dash(summary["samples_per_s"], format_rate), "at the median step"),
        ("goodput", or_dash(summary["goodput"], "{:.1%}".format), _wall(summary)),
        ("restarts", f"{summary['num_restarts']}", _recovery(summary)),
        ("steps lost", f"{summary['lost_steps']:,}", "computed again after failures"),
        ("checkpoints", f"{summary['num_checkpoints']:,}", _stall(summary)),
        ("step time", or_dash(summary["measured_step_s"], format_duration), _prediction(summary)),
        ("speed-up", *_speed_up(summary)),
        (
            "peak memory",
            or_dash(summary["peak_memory_bytes"], format_bytes),
            "on the fullest rank",
        ),
    ]
    return '<div class="tiles">' + "".join(_tile(*tile) for tile in tiles) + "</div>"


def group_table(groups: dict[str, Row], colors: Row) -> str:
    """Predicted and measured speed of each hardware group."""
    if not groups:
        return ""
    head = "group|device|ranks|samples of each step|compute, predicted|compute, measured"
    rows = [
        [
            f'<i class="swatch" style="--color:{colors.get(name, "var(--c0)")}"></i>{escape(name)}',
            escape(str(group["device"])),
            f"{group['num_devices']:,}",
            f"{group['num_samples']:,}",
            or_dash(group["predicted_compute_s"], format_duration),
            or_dash(group["compute_s"], format_duration),
            or_dash(group["samples_per_s"], format_rate),
            or_dash(group["relative_speed"], "{:.2f} x".format),
        ]
        for name, group in groups.items()
    ]
    return table([*head.split("|"), "samples/s", "speed of one device"], rows, num_text_columns=2)


def validation_table(rows: Sequence[Row]) -> str:
    """First, best and last value of each validation metric."""
    body = []
    for name in scalar_names(rows):
        points = [(row[name], row["step"]) for row in rows if row.get(name) is not None]
        values = [value for value, _ in points]
        body.append(
            [
                escape(name),
                format_number(values[0]),
                f"{format_number(min(values))}",
                f"{format_number(max(values))}",
                f"{format_number(values[-1])} at step {points[-1][1]:,}",
            ]
        )
    return table(["metric", "first", "lowest", "highest", "last"], body, num_text_columns=1)


def scalar_names(rows: Sequence[Row]) -> list[str]:
    """Names of the scalars in a table of them, those with a value."""
    names = dict.fromkeys(name for row in rows for name in row)
    fixed = {"step", "time_s", "attempt"}
    return [
        name
        for name in names
        if name not in fixed and any(row.get(name) is not None for row in rows)
    ]


def event_table(events: Sequence[Row]) -> str:
    """The newest events; what several ranks report about one step is one row."""
    if not events:
        return '<p class="empty">Nothing was recorded.</p>'
    merged = _merge(events)
    start_s = min(event["time_s"] for event in events)
    rows = [
        [
            f'<time title="{_date(event["time_s"])}">{event["time_s"] - start_s:,.2f}</time>',
            f"{event['attempt']}",
            _ranks(reports),
            "" if event.get("step") is None else f"{event['step']:,}",
            f'<code class="{_kind(str(event["event"]))}">{escape(str(event["event"]))}</code>',
            escape(_fields(reports)),
        ]
        for reports in merged[-_MAX_EVENTS:]
        for event in reports[:1]
    ]
    head = ["time, s", "attempt", "rank", "step", "event", "details"]
    shown = table(head, rows, num_text_columns=0, first_text_column=4)
    hidden = len(merged) - _MAX_EVENTS
    note = (
        f'<p class="empty">{hidden:,} earlier rows are in events.jsonl.</p>' if hidden > 0 else ""
    )
    return note + shown


def _tile(name: str, value: str, note: str) -> str:
    return (
        f'<div class="tile"><span class="name">{escape(name)}</span>'
        f'<span class="figure">{escape(value)}</span><span class="note">{escape(note)}</span></div>'
    )


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    num_text_columns: int,
    first_text_column: int | None = None,
) -> str:
    """Cells are HTML already. Numbers are set flush right."""

    def is_text(column: int) -> bool:
        after = first_text_column is not None and column >= first_text_column
        return column < num_text_columns or after

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{'' if is_text(column) else ' class=number'}>{cell}</{tag}>"
            for column, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{cells(head, "th")}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def or_dash(value: Any, format_: Any) -> str:
    """`value` as `format_` shows it, a dash for None."""
    return "-" if value is None else str(format_(value))


def _loss(summary: Row) -> tuple[str, str]:
    first, last = summary["first_loss"], summary["last_loss"]
    if last is None:
        return "-", "no step was completed"
    return format_number(last), f"from {format_number(first)} at the first step"


def _wall(summary: Row) -> str:
    wall_s = summary["wall_time_s"]
    return "of the wall time" if wall_s is None else f"of {format_duration(wall_s)} wall time"


def _recovery(summary: Row) -> str:
    recovery_s = summary["recovery_s"]
    if not recovery_s:
        return "no recovery was needed" if not summary["num_failures"] else "none recovered"
    return f"median recovery {format_duration(statistics.median(recovery_s))}"


def _stall(summary: Row) -> str:
    stalls_s, num_failed = summary["checkpoint_stall_s"], summary["num_failed_saves"]
    notes = [f"median stall {format_duration(statistics.median(stalls_s))}"] if stalls_s else []
    return ", ".join([*notes, f"{num_failed:,} failed"] if num_failed else notes)


def _prediction(summary: Row) -> str:
    ratio = summary["step_time_ratio"]
    if ratio is None:
        return "measured median"
    predicted = format_duration(summary["predicted_step_s"])
    return f"predicted {predicted}, ratio {ratio:.3f}"


def _speed_up(summary: Row) -> tuple[str, str]:
    uniform_s, predicted_s = summary["predicted_uniform_step_s"], summary["predicted_step_s"]
    if not uniform_s or not predicted_s:
        return "-", "the equal split was not predicted"
    return f"{uniform_s / predicted_s:.2f} x", "predicted, over the equal split"


def _merge(events: Sequence[Row]) -> list[list[Row]]:
    merged: dict[tuple[Any, ...], list[Row]] = {}
    for index, event in enumerate(events):
        is_own = event.get("rank") is None or event["event"] == EventName.WRITER_RESTART
        own = index if is_own else None
        of_what = (event["event"], event.get("tier"), event.get("path"))
        key = (event["attempt"], event.get("step"), *of_what, own)
        merged.setdefault(key, []).append(event)
    return list(merged.values())


def _ranks(reports: Sequence[Row]) -> str:
    ranks = sorted({event["rank"] for event in reports if event.get("rank") is not None})
    if len(ranks) <= 1:
        return f"{ranks[0]}" if ranks else ""
    is_range = ranks[-1] - ranks[0] == len(ranks) - 1
    return f"{ranks[0]} to {ranks[-1]}" if is_range else f"{len(ranks)} ranks"


def _fields(reports: Sequence[Row]) -> str:
    """`name=value` of each field; values that differ between ranks one after the other."""
    values: dict[str, dict[str, None]] = {}
    for event in reports:
        for name, value in event.items():
            if name not in _EVENT_FIELDS and value is not None:
                shown = value if isinstance(value, str) else json.dumps(value)
                values.setdefault(name, {})[shown] = None
    joined = "  ".join(f"{name}={_some(list(shown))}" for name, shown in values.items())
    return joined if len(joined) <= _MAX_FIELD_CHARS else joined[:_MAX_FIELD_CHARS] + " …"


def _some(values: Sequence[str]) -> str:
    if len(values) <= _MAX_VALUES:
        return ", ".join(values)
    return f"{values[0]} … {values[-1]}"


def _kind(event: str) -> str:
    if event in {"failure_detected", "failure_injected", "heartbeat_missed"}:
        return "bad"
    if event.endswith(("_failed", "_rejected", "_skipped")) or event == EventName.WRITER_RESTART:
        return "bad"
    return "good" if event in {"checkpoint_committed", "run_end"} else ""


def _date(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
