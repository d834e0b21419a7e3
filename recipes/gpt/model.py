"""A GPT: pre-norm Transformer decoder with learned positions.

Shape legend: B batch, L sequence, D model, H heads, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from hetero_fw.errors import ConfigError

_INIT_STD = 0.02
_MLP_RATIO = 4


class Embedding(nn.Module):
    """Token embedding plus learned position embedding."""

    def __init__(self, *, vocab_size: int, sequence_length: int, model_dim: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, model_dim)
        self.positions = nn.Embedding(sequence_length, model_dim)

    def forward(self, input_ids_BL: torch.Tensor) -> torch.Tensor:
        x_BLD: torch.Tensor = self.tokens(input_ids_BL)
        return x_BLD + self.positions.weight[: input_ids_BL.shape[1]]


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, *, model_dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(model_dim, 3 * model_dim)
        self.out = nn.Linear(model_dim, model_dim)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x_BLD).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        y_BLD: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y_BLD


class Block(nn.Module):
    """Attention, then a GELU MLP, each on normalised input and added to the residual stream."""

    def __init__(self, *, model_dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(model_dim)
        self.attention = Attention(model_dim=model_dim, num_heads=num_heads, dropout=dropout)
        self.mlp_norm = nn.LayerNorm(model_dim)
        self.mlp_in = nn.Linear(model_dim, _MLP_RATIO * model_dim)
        self.mlp_out = nn.Linear(_MLP_RATIO * model_dim, model_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        x_BLD = x_BLD + self.dropout(self.attention(self.attention_norm(x_BLD)))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x_BLD)))
        y_BLD: torch.Tensor = x_BLD + self.dropout(self.mlp_out(hidden))
        return y_BLD


class Head(nn.Module):
    """Final normalisation and the projection to the vocabulary."""

    def __init__(self, *, vocab_size: int, model_dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model_dim)
        self.logits = nn.Linear(model_dim, vocab_size, bias=False)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        logits_BLV: torch.Tensor = self.logits(self.norm(x_BLD))
        return logits_BLV


class GPT(nn.Module):
    """Tokens (B, L) to logits (B, L, V).

    Args:
        vocab_size: V.
        sequence_length: the longest L.
        num_layers: number of blocks.
        num_heads: attention heads of a block; must divide `model_dim`.
        model_dim: D.
        dropout: probability of dropping an attention weight or a residual contribution.
        seed: draw the initial weights from a generator of this seed; None for torch's own.

    Raises:
        ConfigError: `num_heads` does not divide `model_dim`.
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
        if model_dim % num_heads:
            raise ConfigError(
                f"model.module.num_heads={num_heads} must divide model_dim={model_dim}."
            )
        self.embedding = Embedding(
            vocab_size=vocab_size, sequence_length=sequence_length, model_dim=model_dim
        )
        self.blocks = nn.ModuleList(
            Block(model_dim=model_dim, num_heads=num_heads, dropout=dropout)
            for _ in range(num_layers)
        )
        self.head = Head(vocab_size=vocab_size, model_dim=model_dim)
        self.reset_parameters(None if seed is None else torch.Generator().manual_seed(seed))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the weights anew: normal with standard deviation 0.02, biases 0.

        Weights that write to the residual stream are scaled down by its number of summands, as in
        GPT-2 (Radford et al. 2019, section 2.3).
        """
        residual_std = _INIT_STD / math.sqrt(2 * max(len(self.blocks), 1))
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear | nn.Embedding):
                is_residual = name.endswith(("attention.out", "mlp_out"))
                std = residual_std if is_residual else _INIT_STD
                nn.init.normal_(module.weight, std=std, generator=generator)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, input_ids_BL: torch.Tensor) -> torch.Tensor:
        x_BLD = self.embedding(input_ids_BL)
        for block in self.blocks:
            x_BLD = block(x_BLD)
        logits_BLV: torch.Tensor = self.head(x_BLD)
        return logits_BLV
