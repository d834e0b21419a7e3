"""Line charts over optimizer steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from hetero_fw.monitoring.report.axis import Scale, padded, plain_number, ticks, x_axis, y_axis

Point = tuple[float, float]

WIDTH, HEIGHT = 900, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 26, 34, 46
_MAX_POINTS = 450


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart.

    Attributes:
        points: (step, value), by step; nan and infinities leave a gap.
        color: CSS color, for example `var(--c0)`.
        style: `line`, `dashed` or `dots` (a line with a dot on each point, for few points).
    """

    name: str
    points: Sequence[Point]
    color: str
    style: str = "line"


def line_chart(
    series: Sequence[Series],
    *,
    y_label: str,
    title: str,
    y_format: Callable[[float], str] = plain_number,
    starts_at_zero: bool = False,
) -> str:
    """The chart with legend, axes and units as HTML, or a sentence if there is nothing to draw.

    Rare values far above all others are cut off, and the legend says how many.
    """
    finite = [point for line in series for point in line.points if math.isfinite(point[1])]
    if not finite:
        return '<p class="empty">Nothing was recorded.</p>'
    ceiling = _ceiling([value for _, value in finite])
    num_cut = sum(value > ceiling for _, value in finite)
    shown = [min(value, ceiling) for _, value in finite]
    low, high = padded(min(shown), max(shown))
    if starts_at_zero:
        low = 0.0
    xs = [step for step, _ in finite]
    x = Scale(low=min(xs), high=max(xs), start=_LEFT, end=WIDTH - _RIGHT)
    if x.low == x.high:
        x = Scale(low=x.low - 1, high=x.high + 1, start=x.start, end=x.end)
    y = Scale(low=low, high=high, start=HEIGHT - _BOTTOM, end=_TOP)
    x_values = [value for value in ticks(x.low, x.high, 9, is_integer=True) if value >= 0]
    body = [
        y_axis(y, ticks(low, high, 6), (_LEFT, WIDTH - _RIGHT), y_label, y_format),
        x_axis(x, x_values, HEIGHT - _BOTTOM, "optimizer step", plain_number),
        *(_draw(line, x, y, ceiling) for line in series),
    ]
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(body)}</svg>"
    )
    return f'{_legend(series, num_cut)}<div class="picture">{svg}</div>'


def _legend(series: Sequence[Series], num_cut: int) -> str:
    keys = [
        f'<span class="key"><i class="{line.style}" style="--color:{line.color}"></i>'
        f"{escape(line.name)}</span>"
        for line in series
    ]
    if num_cut:
        keys.append(f'<span class="key note">{num_cut} far higher values are cut off</span>')
    return f'<p class="legend">{"".join(keys)}</p>'


def _ceiling(values: Sequence[float]) -> float:
    """A bound that only outliers exceed, so that one slow first step does not flatten the rest."""
    if len(values) < 20:
        return max(values)
    ordered = sorted(values)
    bulk = ordered[int(0.97 * (len(ordered) - 1))]
    spread = bulk - ordered[0]
    return max(values) if max(values) <= bulk + 2 * spread or spread == 0 else bulk + 0.5 * spread


def _draw(line: Series, x: Scale, y: Scale, ceiling: float) -> str:
    parts = []
    for run in _unbroken(line.points):
        buckets = _buckets([(step, min(value, ceiling)) for step, value in run])
        is_thinned = len(run) > _MAX_POINTS
        if is_thinned:
            parts.append(_band(buckets, x, y, line.color))
        middle = [(step, statistics.median(values)) for step, values in buckets]
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in middle)
        parts.append(
            f'<polyline class="{line.style}" style="--color:{line.color}" points="{points}"/>'
        )
        if line.style == "dots" or len(run) == 1:
            parts.extend(_dot(line, step, value, x, y) for step, value in middle)
    return "".join(parts)


def _dot(line: Series, step: float, value: float, x: Scale, y: Scale) -> str:
    label = escape(f"{line.name}: {value:.6g} at step {step:.0f}")
    return (
        f'<circle class="dot" style="--color:{line.color}" cx="{x(step):.1f}" cy="{y(value):.1f}" '
        f'r="3.5"><title>{label}</title></circle>'
    )


def _band(buckets: Sequence[tuple[float, list[float]]], x: Scale, y: Scale, color: str) -> str:
    upper = [f"{x(step):.1f},{y(max(values)):.1f}" for step, values in buckets]
    lower = [f"{x(step):.1f},{y(min(values)):.1f}" for step, values in reversed(buckets)]
    return f'<polygon class="band" style="--color:{color}" points="{" ".join(upper + lower)}"/>'


def _buckets(points: Sequence[Point]) -> list[tuple[float, list[float]]]:
    """Neighbouring points put together, so that there are at most `_MAX_POINTS` groups."""
    size = max(1, math.ceil(len(points) / _MAX_POINTS))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[len(group) // 2][0], [value for _, value in group]) for group in groups]


def _unbroken(points: Sequence[Point]) -> list[list[Point]]:
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]
