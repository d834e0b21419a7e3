"""Who says what, where several processes write to one terminal."""

from __future__ import annotations

import logging

_PACKAGE = "hetero_fw"


def label_log_lines(label: str) -> None:
    """Begin each line that hetero_fw logs in this process with `label`; it goes to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{label}: %(message)s"))
    logging.getLogger(_PACKAGE).handlers[:] = [handler]
