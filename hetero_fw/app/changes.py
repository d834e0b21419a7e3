"""What a run is continued with that differs from what it was started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

# What the order of samples depends on; the data set by its length.
_ORDER = ("seed", "data.global_batch_size", "data.train")


def tell_changes(path: Path, text: str, *, has_trained: bool) -> None:
    """Print what differs from the configuration that the run was started with.

    Args:
        path: where that is stored.
        text: the configuration it is continued with.
        has_trained: whether there is a checkpoint to go on from.
    """
    try:
        stored = path.read_text()
    except (OSError, UnicodeDecodeError):
        return  # there is none, or none that says anything
    before, after = set(stored.splitlines()), set(text.splitlines())
    for line in sorted(before - after):
        print(f"configuration changed, was: {line.strip()}")
    for line in sorted(after - before):
        print(f"configuration changed, now: {line.strip()}")
    changed = [key for key in _ORDER if _value(stored, key) != _value(text, key)]
    if changed and has_trained:
        print(
            f"{' and '.join(changed)} changed, on which the order of the samples depends: those of "
            "the epoch under way may come twice or not at all"
        )


def _value(text: str, key: str) -> Any:
    """The value of a dotted `key`; None if there is none, or `text` is no configuration."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value
