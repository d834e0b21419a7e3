"""Global norm and clipping over sharded gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's non-empty gradient shards."""
    grads = (local_tensor(p.grad) for p in parameters if p.grad is not None)
    return [grad for grad in grads if grad.numel()]


def squared_norm(grads: list[Tensor]) -> float:
    """Sum of squares of this rank's gradient shards.

    Shards are disjoint, so the sum of this over ranks is the squared global norm. Not finite if
    any gradient is not.
    """
    if not grads:
        return 0.0
    norms = torch.stack(torch._foreach_norm(grads)).double()
    return float(norms.square().sum())


@torch.no_grad()
def scale_gradients(grads: list[Tensor], factor: float) -> None:
    """Multiply gradient shards in place."""
    if grads and factor != 1.0:
        torch._foreach_mul_(grads, factor)


def clip_factor(norm: float, max_norm: float) -> float:
    """Factor that brings a gradient of global norm `norm` to at most `max_norm`."""
    return min(1.0, max_norm / (norm + 1e-6))
