"""The plan as a picture: a bar for each rank's share of the batch and one for its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby

from hetero_fw.monitoring.history import Row
from hetero_fw.monitoring.quantities import format_bytes, format_duration
from hetero_fw.monitoring.report.axis import text

_WIDTH, _ROW_HEIGHT, _BAR_HEIGHT, _TOP = 900, 34, 18, 30
_SHARE_X, _SHARE_WIDTH = 214, 250
_MEMORY_X, _MEMORY_WIDTH = 600, 150
_MAX_SINGLE_RANKS, _MAX_SEGMENTS, _MAX_ROWS = 32, 48, 200
_SHAPE = ("group", "device", "num_samples", "microbatches", "required_bytes", "budget_bytes")


def plan_picture(plan: Row, colors: Mapping[str, str]) -> str:
    """The picture as HTML, or a sentence if there is no plan.

    Args:
        plan: the plan as a dict. Large plans show equal neighbouring ranks as one bar.
        colors: CSS color of each hardware group.
    """
    ranks: Sequence[Row] = plan.get("ranks", ())
    if not ranks:
        return '<p class="empty">There is no plan.</p>'
    rows = _rows(ranks)
    hidden = len(rows) - _MAX_ROWS
    largest = max(rank["num_samples"] for rank in ranks) or 1
    body = [
        text(0, 14, "rank, node, device", "axis-label"),
        text(_SHARE_X, 14, "samples of each step, cut into micro-batches", "axis-label"),
        text(_MEMORY_X, 14, "memory: predicted of budget", "axis-label"),
    ]
    for index, members in enumerate(rows[:_MAX_ROWS]):
        y = _TOP + index * _ROW_HEIGHT
        color = colors.get(members[0]["group"], "var(--c0)")
        body += [_label(members, y), _share(members[0], y, largest, color), _memory(members[0], y)]
    height = _TOP + _ROW_HEIGHT * min(len(rows), _MAX_ROWS)
    view = f'viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="The plan"'
    svg = f"<svg {view}>{''.join(body)}</svg>"
    note = f'<p class="empty">{hidden} more in plan.json.</p>' if hidden > 0 else ""
    return f'<div class="picture">{svg}</div>{note}'


def _rows(ranks: Sequence[Row]) -> list[list[Row]]:
    if len(ranks) <= _MAX_SINGLE_RANKS:
        return [[rank] for rank in ranks]
    grouped = groupby(ranks, key=lambda rank: [rank[name] for name in _SHAPE])
    return [list(members) for _, members in grouped]


def _label(members: Sequence[Row], y: float) -> str:
    first, last = members[0], members[-1]
    numbers = f"{first['rank']}" if first is last else f"{first['rank']} to {last['rank']}"
    nodes = first["node"] if first["node"] == last["node"] else f"{first['node']} to {last['node']}"
    return text(0, y + 9, f"{numbers}   {nodes}", "row-label") + text(
        0, y + 23, first["device"], "tick"
    )


def _share(rank: Row, y: float, largest: int, color: str) -> str:
    sizes = [size for size in rank["microbatches"] if size] or [rank["num_samples"]]
    if len(sizes) > _MAX_SEGMENTS:
        sizes = [rank["num_samples"]]
    scale = _SHARE_WIDTH / largest
    parts, left = [], float(_SHARE_X)
    for size in sizes:
        width = max(0.5, size * scale - (1.5 if len(sizes) > 1 else 0))
        parts.append(
            f'<rect style="fill:{color}" x="{left:.1f}" y="{y}" width="{width:.1f}" '
            f'height="{_BAR_HEIGHT}" rx="1.5"/>'
        )
        left += size * scale
    title = escape(f"micro-batches: {_run_lengths(rank['microbatches'])}")
    label = f"{rank['num_samples']:,} in {format_duration(rank['compute_s'])}"
    bar = f"<g><title>{title}</title>{''.join(parts)}</g>"
    return bar + text(_SHARE_X + rank["num_samples"] * scale + 8, y + 13, label, "value")


def _memory(rank: Row, y: float) -> str:
    required, budget = rank["required_bytes"], rank["budget_bytes"]
    share = min(1.0, required / budget) if budget else 0.0
    width = max(1.5, _MEMORY_WIDTH * share)
    label = f"{format_bytes(required)} of {format_bytes(budget)}"
    return (
        f'<rect class="track" x="{_MEMORY_X}" y="{y}" width="{_MEMORY_WIDTH}" '
        f'height="{_BAR_HEIGHT}" rx="2"/>'
        f'<rect class="memory" x="{_MEMORY_X}" y="{y}" width="{width:.1f}" '
        f'height="{_BAR_HEIGHT}" rx="2"/>'
    ) + text(_MEMORY_X + _MEMORY_WIDTH + 8, y + 13, label, "value")


def _run_lengths(sizes: Sequence[int]) -> str:
    """`(4, 4, 4, 2, 0)` as `3 x 4, 1 x 2, 1 x 0 (padding)`."""
    runs = ((size, len(list(run))) for size, run in groupby(sizes))
    return ", ".join(f"{num} x {size}{'' if size else ' (padding)'}" for size, num in runs)
