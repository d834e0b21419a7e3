"""Connect the ranks of one attempt."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


def choose_backend(device_types: set[str]) -> str:
    """NCCL where every rank has a CUDA device, gloo for CPU ranks and for a mix of both."""
    return "cpu:gloo,cuda:nccl" if device_types == {"cuda"} else "gloo"


def connect_ranks(
    store: dist.Store, *, rank: int, world_size: int, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """Initialise the default process group and return the gloo group for control traffic.

    All ranks call this once. Control messages have a group of their own, so that they never
    queue behind a gradient, and a bound, so that no rank waits for ever.
    """
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def disconnect_ranks() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
