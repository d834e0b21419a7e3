"""A small GPT. `gpt_workload` comes without torch; the rest is imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from recipes.gpt.workload import gpt_workload

if TYPE_CHECKING:
    from recipes.gpt.model import GPT
    from recipes.gpt.module import GPTModule

__all__ = ["GPT", "GPTModule", "gpt_workload"]

_MODULES = {"GPT": "model", "GPTModule": "module"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
