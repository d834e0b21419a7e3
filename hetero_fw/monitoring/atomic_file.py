"""Files that a reader sees either as they were or as they are to be, never in between."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_text_atomically(path: Path, text: str, *, is_durable: bool = True) -> None:
    """Replace `path` by `text` in one step.

    Args:
        path: the file, new or there already; its directory exists.
        text: the whole content.
        is_durable: wait until the bytes are on the disk, so that a power failure cannot leave an
            empty file under the new name.

    Raises:
        OSError: the directory is missing, full or not writable; `path` is as it was.
    """
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with scratch.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def write_json_atomically(path: Path, data: Mapping[str, Any]) -> None:
    """Replace `path` by `data` as indented JSON."""
    text = json.dumps(without_nonfinite(data), indent=2, allow_nan=False, default=str)
    write_text_atomically(path, text + "\n")


def without_nonfinite(value: Any) -> Any:
    """`value` with nan and infinities as strings: they are not JSON, and other readers choke."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nonfinite(item) for item in value]
    return value
