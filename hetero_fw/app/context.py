"""What one rank of one attempt works with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from hetero_fw.monitoring import EventLog, RunDirectory
from hetero_fw.parallel import Exchange
from hetero_fw.planning import ParallelPlan
from hetero_fw.recovery import SaveRequest, StopRequest


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Everything about one rank of one attempt that does not change while it trains."""

    cfg: DictConfig
    plan: ParallelPlan
    rank: int
    device: torch.device
    run_dir: RunDirectory
    attempt: int
    exchange: Exchange
    group: dist.ProcessGroup | None
    store: dist.Store
    stop: StopRequest
    save: SaveRequest
    events: EventLog
