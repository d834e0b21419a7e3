from __future__ import annotations

import pytest

from hetero_fw.monitoring.quantities import (
    format_bytes,
    format_duration,
    format_number,
    format_rate,
)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 * 2**29, "1.50 GiB")],
)
def test_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0042, "4.2 ms"),
        (12.34, "12.3 s"),
        (59.96, "1:00"),
        (125, "2:05"),
        (3725, "1:02:05"),
        (3 * 86400, "3 d 0 h"),
        (float("inf"), "?"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_rates_and_numbers() -> None:
    assert [format_rate(value) for value in (1234.6, 56.78, 0.05678)] == ["1,235", "56.8", "0.0568"]
    assert [format_number(value) for value in (None, 12345, 2.34567)] == ["", "12,345", "2.346"]
