"""Handwritten digits. `digits_workload` comes without torch; the rest is imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from recipes.digits.workload import digits_workload

if TYPE_CHECKING:
    from recipes.digits.data import DigitsDataset
    from recipes.digits.module import DigitsModule

__all__ = ["DigitsDataset", "DigitsModule", "digits_workload"]

_MODULES = {"DigitsDataset": "data", "DigitsModule": "module"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
