"""Texts that must not appear in anything that is printed, logged or stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MASK = "***"

# Options that help to find a fault and give nothing away, unless a password is part of them.
_SHOWN_OPTIONS = ("endpoint_url", "host", "region_name")
# Hiding every "1" and "us" would garble all texts and hide nothing.
_SHORTEST_SECRET = 4


def without_secrets(text: str, options: Mapping[str, Any]) -> str:
    """`text` with a mask for each value that occurs in `options`, at any depth."""
    for secret in sorted(_secrets(options), key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text


def _secrets(options: Any, name: str = "") -> Iterator[str]:
    if isinstance(options, Mapping):
        for key, value in options.items():
            yield from _secrets(value, str(key))
    elif isinstance(options, list | tuple):
        for value in options:
            yield from _secrets(value, name)
    elif options is not None and not isinstance(options, bool):
        text = str(options)
        is_shown = name in _SHOWN_OPTIONS and "@" not in text
        if not is_shown and len(text) >= _SHORTEST_SECRET:
            yield text
