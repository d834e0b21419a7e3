"""State of schedulers, callbacks and modules as JSON values, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TENSOR = "__tensor__"
_ARRAY = "__array__"
_BYTES = "__bytes__"
_SET = "__set__"
_ITEMS = "__items__"
_COUNTER = "__counter__"


def to_plain(value: Any, on_lost: Callable[[str], None] | None = None, path: str = "") -> Any:
    """JSON-able copy of nested containers, numbers, strings, bytes, small tensors and arrays.

    What has no such form is left out. Of callables nothing is said: those of a scheduler come back
    with it.

    Args:
        value: what is kept.
        on_lost: told where something else is left out, and of what type.
        path: where `value` is, for that.
    """

    def inner(item: Any, key: Any) -> Any:
        return to_plain(item, on_lost, f"{path}.{key}" if path else str(key))

    if isinstance(value, Tensor | np.ndarray | np.generic | bytes | bytearray):
        return _tagged(value)
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        # JSON would make text of other keys, and MultiStepLR no longer find its milestones.
        mark = _COUNTER if isinstance(value, Counter) else _ITEMS
        return {mark: [[inner(key, key), inner(item, key)] for key, item in value.items()]}
    if isinstance(value, dict):
        return {key: inner(item, key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [inner(item, index) for index, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return {_SET: [inner(item, item) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if on_lost is not None and not callable(value):
        on_lost(f"{path} ({type(value).__name__})")
    return None


def _tagged(value: Tensor | np.ndarray[Any, Any] | np.generic | bytes | bytearray) -> Any:
    """Numbers and bytes with what it takes to make the same of them again."""
    if isinstance(value, Tensor):
        return {_TENSOR: value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, np.ndarray):
        return {_ARRAY: value.tolist(), "dtype": value.dtype.name}
    return value.item() if isinstance(value, np.generic) else {_BYTES: bytes(value).hex()}


def from_plain(value: Any) -> Any:
    """Inverse of `to_plain`; tuples come back as lists."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return torch.tensor(value[_TENSOR], dtype=getattr(torch, value["dtype"]))
    if _ARRAY in value:
        return np.array(value[_ARRAY], dtype=value["dtype"])
    if _BYTES in value:
        return bytes.fromhex(value[_BYTES])
    if _SET in value:
        return {_hashable(from_plain(item)) for item in value[_SET]}
    if _ITEMS in value or _COUNTER in value:
        pairs = value[_ITEMS] if _ITEMS in value else value[_COUNTER]
        items = {_hashable(from_plain(key)): from_plain(item) for key, item in pairs}
        return Counter(items) if _COUNTER in value else items
    return {key: from_plain(item) for key, item in value.items()}


def _hashable(key: Any) -> Any:
    return tuple(map(_hashable, key)) if isinstance(key, list) else key
