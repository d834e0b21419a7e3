"""Numbers as people read them."""

from __future__ import annotations

import math

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(num_bytes: float) -> str:
    """`1610612736` as `1.50 GiB`."""
    power = 0
    while abs(num_bytes) >= 1024 and power < len(_BYTE_UNITS) - 1:
        num_bytes /= 1024
        power += 1
    return f"{num_bytes:.0f} B" if power == 0 else f"{num_bytes:.2f} {_BYTE_UNITS[power]}"


def format_duration(seconds: float) -> str:
    """`0.0042` as `4.2 ms`, `12.3` as `12.3 s`, `3725` as `1:02:05`."""
    if not math.isfinite(seconds):
        return "?"
    if abs(seconds) < 1:
        return f"{seconds * 1000:.3g} ms" if seconds else "0 s"
    if abs(seconds) < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_rate(per_s: float) -> str:
    """`1234.5` as `1,234`, `0.0567` as `0.0567`."""
    return f"{per_s:,.0f}" if abs(per_s) >= 1000 else f"{per_s:.3g}"


def format_number(value: float | None) -> str:
    """Four significant digits; an empty string for None."""
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
