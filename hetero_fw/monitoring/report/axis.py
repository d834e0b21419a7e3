"""Scales and ticks of the report's pictures, and the SVG text they become."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_TICK_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Maps values of [low, high] to pixels of [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = (self.high - self.low) or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)


def ticks(low: float, high: float, max_num: int = 6, *, is_integer: bool = False) -> list[float]:
    """Round values within [low, high], at most `max_num` of them."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / max_num))
    step = next(factor * power for factor in _TICK_STEPS if span / (factor * power) < max_num)
    if is_integer:
        step = max(1.0, math.ceil(step))
    return _multiples(step, low, high)


def time_ticks(high_s: float, max_num: int = 8) -> list[float]:
    """The same for seconds since a start, in steps that clocks count in."""
    if high_s <= 1:
        return ticks(0.0, high_s, max_num)
    days = 86400.0 * max(1, math.ceil(high_s / 86400 / max_num))
    step = next((float(step) for step in _TIME_STEPS_S if high_s / step < max_num), days)
    return _multiples(step, 0.0, high_s)


def padded(low: float, high: float) -> tuple[float, float]:
    """The interval with some air, never empty."""
    if low == high:
        pad = abs(low) * 0.05 or 0.5
        return low - pad, high + pad
    return low - 0.04 * (high - low), high + 0.06 * (high - low)


def x_axis(
    scale: Scale, values: Sequence[float], y: float, label: str, format_: Callable[[float], str]
) -> str:
    """Line, ticks, numbers and name of a horizontal axis at height `y`."""
    parts = [f'<line class="axis" x1="{scale.start:.1f}" x2="{scale.end:.1f}" y1="{y}" y2="{y}"/>']
    for value in values:
        x = scale(value)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 4}"/>')
        parts.append(text(x, y + 17, format_(value), "tick middle"))
    parts.append(text((scale.start + scale.end) / 2, y + 35, label, "axis-label middle"))
    return "".join(parts)


def y_axis(
    scale: Scale,
    values: Sequence[float],
    x: tuple[float, float],
    label: str,
    format_: Callable[[float], str],
) -> str:
    """Grid lines between the two `x`, numbers on their left, the name above."""
    parts = []
    for value in values:
        y = scale(value)
        parts.append(f'<line class="grid" x1="{x[0]}" x2="{x[1]}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text(x[0] - 8, y + 4, format_(value), "tick end"))
    parts.append(text(x[0] - 8, scale.end - 12, label, "axis-label"))
    return "".join(parts)


def text(x: float, y: float, content: str, classes: str = "") -> str:
    """An SVG text element; `content` is escaped."""
    return f'<text class="{classes}" x="{x:.1f}" y="{y:.1f}">{escape(content)}</text>'


def plain_number(value: float) -> str:
    """`0.30000000000000004` as `0.3`."""
    return f"{value:,.10g}" if abs(value) >= 1 else f"{value:.6g}"


def _multiples(step: float, low: float, high: float) -> list[float]:
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]
