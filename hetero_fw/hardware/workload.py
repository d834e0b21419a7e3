"""What one training step of a model costs, as plain data that needs no torch to compute."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """Cost of one layer for one sample.

    Attributes:
        name: prefix of the layer's parameter names, for example `blocks.0`.
        num_params: number of trainable parameters.
        forward_flops: FLOPs of the forward pass for one sample (a multiply-add counts two).
        backward_flops: FLOPs of the backward pass for one sample.
        activation_bytes: bytes kept from forward to backward for one sample, at 4 bytes a number
            (halved by the planner under mixed precision).
    """

    name: str
    num_params: int
    forward_flops: float
    backward_flops: float
    activation_bytes: int


@dataclass(frozen=True, kw_only=True)
class WorkloadProfile:
    """A model as the planner sees it.

    Attributes:
        layers: in execution order.
        tokens_per_sample: loss terms one sample contributes, for reports only.
        optimizer_bytes_per_param: optimizer state in bytes for one parameter (Adam in fp32: 8).
        is_estimated: True if the figures were derived from parameter counts alone.
    """

    name: str
    layers: tuple[LayerProfile, ...]
    tokens_per_sample: int = 1
    optimizer_bytes_per_param: int = 8
    is_estimated: bool = False

    @property
    def num_params(self) -> int:
        return sum(layer.num_params for layer in self.layers)

    @property
    def flops_per_sample(self) -> float:
        """Forward plus backward FLOPs of one sample."""
        return sum(layer.forward_flops + layer.backward_flops for layer in self.layers)

    @property
    def activation_bytes_per_sample(self) -> int:
        return sum(layer.activation_bytes for layer in self.layers)
