"""Data: which samples a step uses, and loaders that deliver them to a rank.

`check_paths` works without torch, so that a configuration can be judged before any process starts;
everything else is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hetero_fw.data.paths import check_paths

if TYPE_CHECKING:
    from hetero_fw.data.loader import build_train_loader, build_val_loader
    from hetero_fw.data.microbatch import MicroBatch
    from hetero_fw.data.sampler import MicroBatchRequest, RankPart, StepIndexedSampler
    from hetero_fw.data.text import ByteTextDataset

__all__ = [
    "ByteTextDataset",
    "MicroBatch",
    "MicroBatchRequest",
    "RankPart",
    "StepIndexedSampler",
    "build_train_loader",
    "build_val_loader",
    "check_paths",
]

_MODULES = {
    "ByteTextDataset": "text",
    "MicroBatch": "microbatch",
    "MicroBatchRequest": "sampler",
    "RankPart": "sampler",
    "StepIndexedSampler": "sampler",
    "build_train_loader": "loader",
    "build_val_loader": "loader",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
