"""What a run is continued with that differs from what it was started with."""

from __future__ import annotations

from pathlib import Path


def tell_changes(path: Path, text: str) -> None:
    """Print what differs from the configuration that the run was started with.

    Args:
        path: where that is stored.
        text: the configuration it is continued with.
    """
    try:
        before, after = set(path.read_text().splitlines()), set(text.splitlines())
    except (OSError, UnicodeDecodeError):
        return  # there is none, or none that says anything
    for line in sorted(before - after):
        print(f"configuration changed, was: {line.strip()}")
    for line in sorted(after - before):
        print(f"configuration changed, now: {line.strip()}")
