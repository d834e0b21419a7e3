"""Costs of a model that does not state its own: from its parameters alone."""

from __future__ import annotations

from torch import nn

from hetero_fw.hardware import LayerProfile, WorkloadProfile

# Each parameter takes part in one multiply-add per sample; backward costs twice the forward pass
# (Kaplan et al., arXiv 2001.08361, 2.1). A model that applies weights at many positions of a
# sample costs as many times more; such a model should state its workload.
_FORWARD_FLOPS_PER_PARAM = 2.0
_BACKWARD_FLOPS_PER_PARAM = 4.0
# Rough, and rather too much: a number kept for each parameter that a sample meets.
_ACTIVATION_BYTES_PER_PARAM = 4


def estimate_workload(module: nn.Module) -> WorkloadProfile:
    """Count the parameters of each direct child of `module` and of what lies beside them."""
    layers = [
        _layer(name, sum(p.numel() for p in child.parameters()))
        for name, child in module.named_children()
    ]
    own = sum(p.numel() for p in module.parameters(recurse=False))
    layers += [_layer("", own)] if own else []
    return WorkloadProfile(
        name=type(module).__name__,
        layers=tuple(layer for layer in layers if layer.num_params),
        is_estimated=True,
    )


def _layer(name: str, num_params: int) -> LayerProfile:
    return LayerProfile(
        name=name,
        num_params=num_params,
        forward_flops=_FORWARD_FLOPS_PER_PARAM * num_params,
        backward_flops=_BACKWARD_FLOPS_PER_PARAM * num_params,
        activation_bytes=_ACTIVATION_BYTES_PER_PARAM * num_params,
    )
