"""A GPT with state of every kind that a module can keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import SumMetric

from tests.recovery.modules import FaultyGPT


class KeepingGPT(FaultyGPT):
    """Its loss depends on all of it, which is the same on all ranks.

    Tied weights, a block that is used twice, a metric, an entry of its own in the `state_dict`.

    Args:
        grows: it has buffers as well that get larger, begin as None or are registered in training.
    """

    def __init__(self, *, grows: bool, **faulty: Any) -> None:
        super().__init__(**faulty)
        self.model.head.logits.weight = self.model.embedding.tokens.weight
        self.model.blocks.append(self.model.blocks[0])
        self.total = SumMetric(sync_on_compute=False)
        self.total.persistent(True)
        self.num_begun = 0
        self._grows = grows
        if grows:
            self.register_buffer("seen", torch.zeros(0))
            self.register_buffer("newest", None)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.num_begun += 1
        self.total.update(float(self.num_begun))
        if not self._grows:
            return
        self.seen = torch.cat([self.seen, torch.ones(1)])
        self.newest = torch.ones(1) if self.newest is None else self.newest + 1
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.zeros(1))
        self.late = self.late + len(self.seen)

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        kept = 1.0 + self.num_begun + float(self.total.compute())
        if self._grows:
            kept += float(self.seen.sum() + self.newest + self.late)
        return super().training_step(batch, batch_idx) / kept

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}num_begun"] = torch.tensor(self.num_begun)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.num_begun = int(state_dict.pop(f"{prefix}num_begun"))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class ExtraGPT(FaultyGPT):
    """Keeps what no checkpoint holds."""

    def get_extra_state(self) -> dict[str, int]:
        return {"a": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass
