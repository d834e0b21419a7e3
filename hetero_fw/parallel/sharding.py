"""Shard a module with FSDP2 so that gradients are exact sums, however unequal the shares are."""

from __future__ import annotations

from collections import Counter

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def build_mesh(device_type: str) -> DeviceMesh:
    """One mesh axis over all ranks of the default process group, in rank order."""
    return DeviceMesh(device_type, list(range(dist.get_world_size())), mesh_dim_names=("shard",))


def shard_units(module: nn.Module) -> list[nn.Module]:
    """The submodules that are gathered and freed as one: the items of every `nn.ModuleList`.

    Repeated blocks sit in module lists by convention; what is outside belongs to the root unit. So
    does a block with a parameter that is used outside of it too (tied weights): one that belongs
    to two units would be two.
    """
    units: dict[nn.Module, None] = {}  # one that is in a list twice is one unit
    num_places = _places(module)
    for child in module.modules():
        if isinstance(child, nn.ModuleList):
            units |= {item: None for item in child if _is_closed(item, num_places)}
    return list(units)


def _is_closed(module: nn.Module, num_places: Counter[nn.Parameter]) -> bool:
    """Whether it has parameters, and no place elsewhere has one of them."""
    own = _places(module)
    return bool(own) and all(num_places[parameter] == count for parameter, count in own.items())


def _places(module: nn.Module) -> Counter[nn.Parameter]:
    """In how many places of `module` each parameter is."""
    return Counter(
        parameter for child in module.modules() for parameter in child.parameters(recurse=False)
    )


def apply_fsdp(module: nn.Module, *, mesh: DeviceMesh, zero_stage: int) -> nn.Module:
    """Apply `fully_shard` to `module` in place and return it.

    Gradients are reduced by SUM and not divided: each rank weights its own loss by its share of
    the global batch, which is exact for unequal shares. Gloo has no PREMUL_SUM, so the sum is
    forced on every backend.

    Args:
        zero_stage: 2 keeps parameters gathered from forward to the end of backward; 3 frees them
            after each use.
    """
    reshard = zero_stage == 3
    for unit in shard_units(module):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    for sharded in fsdp_modules(module):
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    return module


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """Every sharded unit in `module`, the root included; empty if it is not sharded."""
    return [child for child in module.modules() if isinstance(child, FSDPModule)]


def set_gradient_sync(module: nn.Module, *, is_last: bool, zero_stage: int) -> None:
    """Choose whether the next backward pass reduces gradients and frees parameters.

    Under ZeRO-2 only the last micro-batch of a step communicates; under ZeRO-3 each one does,
    since unreduced gradients would need the memory that sharding saves.
    """
    if not isinstance(module, FSDPModule) or zero_stage == 3:
        return
    module.set_requires_gradient_sync(is_last)
    module.set_reshard_after_backward(is_last)
