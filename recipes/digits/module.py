"""A classifier for handwritten digits. The optimizer is the framework's."""

from __future__ import annotations

from itertools import pairwise

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from recipes.digits.workload import NUM_CLASSES, NUM_PIXELS

Batch = tuple[torch.Tensor, torch.Tensor]


class DigitsModule(LightningModule):
    """A multilayer perceptron on batches (pixels (B, 64), labels (B,)).

    Args:
        hidden_dim: units in each hidden layer.
        num_hidden_layers: number of hidden layers.
    """

    def __init__(self, *, hidden_dim: int = 128, num_hidden_layers: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        widths = [NUM_PIXELS, *[hidden_dim] * num_hidden_layers, NUM_CLASSES]
        self.layers = nn.ModuleList(
            nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)
        )
        self.val_accuracy = MulticlassAccuracy(num_classes=NUM_CLASSES, average="micro")

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Logits (B, 10)."""
        *hidden_layers, last = self.layers
        for layer in hidden_layers:
            pixels = F.relu(layer(pixels))
        logits: torch.Tensor = last(pixels)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Mean cross-entropy over the samples of the batch."""
        pixels, labels = batch
        return F.cross_entropy(self(pixels), labels)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log `val_loss` and `val_accuracy` over all validation samples of all ranks."""
        pixels, labels = batch
        logits = self(pixels)
        self.val_accuracy(logits, labels)
        self.log(
            "val_loss",
            F.cross_entropy(logits, labels),
            batch_size=len(labels),
            on_step=False,
            on_epoch=True,
            sync_dist=True,
        )
        self.log(
            "val_accuracy",
            self.val_accuracy,
            batch_size=len(labels),
            on_step=False,
            on_epoch=True,
            prog_bar=True,
        )
