"""The GPT as a LightningModule. The optimizer is the framework's: no configure_optimizers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from lightning.pytorch import LightningModule
from torch.nn import functional as F

from recipes.gpt.model import GPT

IGNORED_LABEL = -100

Batch = Mapping[str, torch.Tensor]


class GPTModule(LightningModule):
    """Next-token prediction on batches `{"input_ids": (B, L), "labels": (B, L)}`.

    Labels of -100 are no loss terms. The arguments are those of `GPT`.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        sequence_length: int,
        num_layers: int,
        num_heads: int,
        model_dim: int,
        dropout: float = 0.0,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT(
            vocab_size=vocab_size,
            sequence_length=sequence_length,
            num_layers=num_layers,
            num_heads=num_heads,
            model_dim=model_dim,
            dropout=dropout,
            seed=seed,
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits (B, L, V)."""
        logits: torch.Tensor = self.model(input_ids)
        return logits

    def num_targets(self, batch: Batch) -> int:
        """Loss terms of a batch: how much its mean loss weighs in the global batch."""
        return int((batch["labels"] != IGNORED_LABEL).sum())

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Mean cross-entropy over the loss terms of the batch, 0 if it has none."""
        return self._mean_loss(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log `val_loss`, the mean over all loss terms of the validation data."""
        loss = self._mean_loss(batch)
        self.log(
            "val_loss",
            loss,
            batch_size=self.num_targets(batch),
            on_step=False,
            on_epoch=True,
            prog_bar=True,
            sync_dist=True,
        )

    def _mean_loss(self, batch: Batch) -> torch.Tensor:
        logits = self(batch["input_ids"])
        labels = batch["labels"].flatten()
        loss_sum = F.cross_entropy(
            logits.flatten(0, 1), labels, ignore_index=IGNORED_LABEL, reduction="sum"
        )
        return loss_sum / (labels != IGNORED_LABEL).sum().clamp(min=1)
