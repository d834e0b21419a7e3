"""The run over time: attempts, steps, checkpoints, failures and restarts in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from hetero_fw.monitoring.events import EventName
from hetero_fw.monitoring.history import Row, RunHistory
from hetero_fw.monitoring.quantities import format_duration
from hetero_fw.monitoring.report.axis import (
    Scale,
    plain_number,
    text,
    ticks,
    time_ticks,
    x_axis,
    y_axis,
)

_WIDTH = 900
_LEFT, _RIGHT, _TOP = 106, 26, 30
_PLOT_BOTTOM, _LANE_HEIGHT = 214, 30
_MAX_POINTS, _MAX_MARKERS = 600, 400
_MIN_PAUSE_S = 60.0

_FAILURES = frozenset(
    {EventName.FAILURE_DETECTED, EventName.FAILURE_INJECTED, EventName.HEARTBEAT_MISSED}
)
_SETBACKS = frozenset(
    {
        EventName.CHECKPOINT_FAILED,
        EventName.CHECKPOINT_REJECTED,
        EventName.STEP_SKIPPED,
        EventName.WRITER_RESTART,
    }
)
_RETURNS = frozenset({EventName.RESTART, EventName.RESTORED, EventName.REPLAN, EventName.ROLLBACK})
_SAVES = frozenset({EventName.CHECKPOINT_COMMITTED, EventName.EMERGENCY_SAVE})
_LANES: tuple[tuple[str, frozenset[EventName], str, str], ...] = (
    ("checkpoints", _SAVES, "diamond", "var(--good)"),
    ("failures", _FAILURES | _SETBACKS, "cross", "var(--bad)"),
    ("restarts", _RETURNS, "triangle", "var(--c3)"),
)


@dataclass(frozen=True)
class Clock:
    """Seconds of the run without the pauses between attempts in which nothing ran."""

    start_s: float
    pauses: tuple[tuple[float, float], ...]

    def __call__(self, time_s: float) -> float:
        cut_s = sum(min(max(time_s - begin, 0.0), end - begin) for begin, end in self.pauses)
        return time_s - self.start_s - cut_s


def timeline(history: RunHistory) -> str:
    """The picture as HTML, or a sentence if the run left no event."""
    marks = sorted(
        (row["time_s"], row["attempt"])
        for row in (*history.events, *history.steps, *history.lost_steps)
    )
    if not marks:
        return '<p class="empty">Nothing was recorded.</p>'
    clock = _clock(marks)
    bottom = _PLOT_BOTTOM + 14 + _LANE_HEIGHT * (len(_LANES) + 1)
    end_s = max(clock(marks[-1][0]), 1e-3)
    x = Scale(low=0.0, high=end_s, start=_LEFT, end=_WIDTH - _RIGHT)
    label = "running time, pauses cut out" if clock.pauses else "time since the start"
    body = [
        _pauses(clock, x, bottom),
        _failure_lines(history.events, clock, x, bottom),
        _progress(history, clock, x),
        _attempts(marks, history.events, clock, x),
        *(_lane(index, history.events, clock, x) for index in range(len(_LANES))),
        x_axis(x, time_ticks(end_s), bottom, label, _clock_label),
    ]
    svg = (
        f'<svg viewBox="0 0 {_WIDTH} {bottom + 44}" role="img" aria-label="The run over time">'
        f"{''.join(body)}</svg>"
    )
    return f'{_LEGEND}<div class="picture">{svg}</div>'


_LEGEND = (
    '<p class="legend">'
    '<span class="key"><i class="line" style="--color:var(--c0)"></i>steps that count</span>'
    '<span class="key"><i class="dashed" style="--color:var(--bad)"></i>steps lost</span>'
    '<span class="key"><b class="good">&#9670;</b> checkpoint committed</span>'
    '<span class="key"><b class="bad">&#10005;</b> failure, failed save, '
    "rejected checkpoint, writer restart, skipped step</span>"
    '<span class="key"><b class="back">&#9650;</b> restart, weights restored</span></p>'
)


def _clock_label(time_s: float) -> str:
    return "0" if time_s == 0 else format_duration(time_s).replace(".0 s", " s")


def _clock(marks: Sequence[tuple[float, int]]) -> Clock:
    """Cut out long silences between two attempts; within one, a silence is worth seeing."""
    total_s = marks[-1][0] - marks[0][0]
    pauses = [
        (before[0], after[0])
        for before, after in pairwise(marks)
        if after[1] != before[1] and after[0] - before[0] > max(_MIN_PAUSE_S, 0.2 * total_s)
    ]
    return Clock(marks[0][0], tuple(pauses))


def _pauses(clock: Clock, x: Scale, bottom: float) -> str:
    parts = []
    for begin, end in clock.pauses:
        at = x(clock(begin))
        parts.append(f'<line class="pause" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(text(at, _TOP - 4, f"pause of {format_duration(end - begin)}", "tick middle"))
    return "".join(parts)


def _failure_lines(events: Sequence[Row], clock: Clock, x: Scale, bottom: float) -> str:
    times_s = [event["time_s"] for event in events if event["event"] == EventName.FAILURE_DETECTED]
    return "".join(
        f'<line class="failure" x1="{x(clock(time_s)):.1f}" x2="{x(clock(time_s)):.1f}" '
        f'y1="{_TOP}" y2="{bottom}"/>'
        for time_s in times_s[-_MAX_MARKERS:]
    )


def _progress(history: RunHistory, clock: Clock, x: Scale) -> str:
    highest = max((row["step"] for row in (*history.steps, *history.lost_steps)), default=1)
    y = Scale(low=0, high=highest * 1.05, start=_PLOT_BOTTOM, end=_TOP)
    axis = y_axis(
        y,
        ticks(0, highest, 5, is_integer=True),
        (_LEFT, _WIDTH - _RIGHT),
        "optimizer step",
        plain_number,
    )
    kept = _polylines(history.steps, clock, x, y, "line", "var(--c0)")
    lost = _polylines(history.lost_steps, clock, x, y, "dashed", "var(--bad)")
    return axis + lost + kept


def _polylines(
    rows: Sequence[Row], clock: Clock, x: Scale, y: Scale, style: str, color: str
) -> str:
    """One line for each attempt: work does not continue across a failure."""
    by_attempt: dict[int, list[Row]] = {}
    for row in rows:
        by_attempt.setdefault(row["attempt"], []).append(row)
    stride = 1 + len(rows) // _MAX_POINTS
    parts = []
    for group in by_attempt.values():
        chosen = [*group[:-1:stride], group[-1]]
        starts = (x(clock(group[0]["time_s"] - group[0]["step_time_s"])), y(group[0]["step"] - 1))
        points = [starts, *((x(clock(row["time_s"])), y(row["step"])) for row in chosen)]
        joined = " ".join(f"{max(x.start, px):.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline class="{style}" style="--color:{color}" points="{joined}"/>')
    return "".join(parts)


def _attempts(
    marks: Sequence[tuple[float, int]], events: Sequence[Row], clock: Clock, x: Scale
) -> str:
    y = _lane_y(0)
    failed = {event["attempt"] for event in events if event["event"] == EventName.FAILURE_DETECTED}
    spans: dict[int, tuple[float, float]] = {}
    for time_s, attempt in marks:
        spans[attempt] = (spans.get(attempt, (time_s, time_s))[0], time_s)
    parts = [text(0, y + 4, "attempts", "lane-label")]
    for attempt, (begin, end) in spans.items():
        left, right = x(clock(begin)), x(clock(end))
        outcome = "failed" if attempt in failed else "ended without a failure"
        label = escape(f"attempt {attempt}: {format_duration(end - begin)}, {outcome}")
        kind = "attempt failed" if attempt in failed else "attempt"
        width = max(2.0, right - left - 1)
        parts.append(
            f'<rect class="{kind}" x="{left:.1f}" y="{y - 9}" width="{width:.1f}" height="18" '
            f' rx="3"><title>{label}</title></rect>'
        )
        if right - left > 9 * len(str(attempt)) + 8:
            parts.append(text((left + right) / 2, y + 4, str(attempt), "on-bar middle"))
    return "".join(parts)


def _lane_y(index: int) -> float:
    return _PLOT_BOTTOM + 14 + _LANE_HEIGHT * (index + 0.5)


def _lane(index: int, events: Sequence[Row], clock: Clock, x: Scale) -> str:
    name, names, shape, color = _LANES[index]
    y = _lane_y(index + 1)
    # A save that an exception asked for, and that did not come about, is no save.
    chosen = [e for e in events if e["event"] in names and e.get("is_saved", True)]
    stride = 1 + len(chosen) // _MAX_MARKERS
    markers = [
        f'<path class="marker" style="--color:{color}" d="{_shape(shape, x(at_s), y)}">'
        f"<title>{escape(_marker_label(event, at_s))}</title></path>"
        for event in chosen[::stride]
        for at_s in (clock(event["time_s"]),)
    ]
    line = f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
    return text(0, y + 4, name, "lane-label") + line + "".join(markers)


def _marker_label(event: Row, at_s: float) -> str:
    step = f" at step {event['step']}" if event.get("step") is not None else ""
    tier = f" ({event['tier']})" if event.get("tier") else ""
    why = event.get("detail") or event.get("reason") or ""
    return f"{event['event']}{step}{tier}, {format_duration(at_s)}. {why}".rstrip(" .")


def _shape(shape: str, x: float, y: float) -> str:
    if shape == "diamond":
        return f"M{x:.1f} {y - 6}l6 6l-6 6l-6 -6z"
    if shape == "triangle":
        return f"M{x:.1f} {y - 6}l6 11h-12z"
    return f"M{x - 5:.1f} {y - 5}l10 10m0 -10l-10 10"
