"""Turn a plan into torch objects: process groups, shards, exact gradients."""

from hetero_fw.parallel.exchange import Exchange, PendingSum, StepReport
from hetero_fw.parallel.gradients import (
    clip_factor,
    local_gradients,
    local_tensor,
    scale_gradients,
    squared_norm,
)
from hetero_fw.parallel.loss_scale import DynamicLossScale
from hetero_fw.parallel.process_group import (
    choose_backend,
    connect_ranks,
    disconnect_ranks,
)
from hetero_fw.parallel.sharding import (
    apply_fsdp,
    build_mesh,
    fsdp_modules,
    set_gradient_sync,
    shard_units,
)
from hetero_fw.parallel.step import StepResult, StepSource

__all__ = [
    "DynamicLossScale",
    "Exchange",
    "PendingSum",
    "StepReport",
    "StepResult",
    "StepSource",
    "apply_fsdp",
    "build_mesh",
    "choose_backend",
    "clip_factor",
    "connect_ranks",
    "disconnect_ranks",
    "fsdp_modules",
    "local_gradients",
    "local_tensor",
    "scale_gradients",
    "set_gradient_sync",
    "shard_units",
    "squared_norm",
]
