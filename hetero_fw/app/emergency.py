"""Build the emergency saves of one rank from `callbacks.emergency_save`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from hetero_fw.app.build import constructing
from hetero_fw.callbacks import AdaptiveCheckpoint, EmergencySave, LimitWatch
from hetero_fw.errors import ConfigError
from hetero_fw.monitoring import (
    EventLog,
    HostTelemetry,
    NvmlTelemetry,
    TelemetrySource,
    TelemetryThread,
)
from hetero_fw.parallel import StepSource
from hetero_fw.policies import Limit, LimitRule, Measure
from hetero_fw.recovery import SaveRequest


@dataclass(frozen=True, kw_only=True)
class WatchedRank:
    """Whose readings are taken: this rank's own device, and its host if it is first there."""

    rank: int
    local_rank: int
    device: torch.device


def build_emergency_save(
    cfg: DictConfig | None,
    watched: WatchedRank,
    *,
    source: StepSource,
    checkpointing: AdaptiveCheckpoint,
    signals: SaveRequest,
    events: EventLog,
) -> EmergencySave | None:
    """The callback, or None if `cfg`, the section `callbacks.emergency_save`, is null.

    Raises:
        ConfigError: `source` cannot be made or is none.
    """
    if cfg is None:
        return None
    watch = LimitWatch(limit_rule(cfg))
    return EmergencySave(
        source=source,
        save_soon=checkpointing.save_soon,
        watch=watch,
        telemetry=TelemetryThread(
            _sources(cfg, watched),
            interval_s=cfg.interval_s,
            on_reading=watch.observe,
            on_error=partial(_tell, watched.rank),
        ),
        signals=signals,
        events=events,
        rank=watched.rank,
    )


def limit_rule(cfg: DictConfig) -> LimitRule:
    """The limits as the policy takes them; those that are null are left out."""
    values = OmegaConf.to_container(cfg)
    assert isinstance(values, dict)
    limits = {m: Limit(**values[m.value]) for m in Measure if values[m.value] is not None}
    return LimitRule(limits=limits, cooldown_s=cfg.cooldown_s)


def _sources(cfg: DictConfig, watched: WatchedRank) -> list[TelemetrySource]:
    if cfg.source is not None:
        return [_own_source(cfg.source, watched)]
    sources: list[TelemetrySource] = []
    # All ranks of a host would read the same.
    if watched.local_rank == 0:
        sources.append(HostTelemetry(with_swap=cfg.host_swap_percent is not None))
    if watched.device.type == "cuda":
        sources.append(_nvml(watched.device))
    return sources


def _own_source(node: DictConfig, watched: WatchedRank) -> TelemetrySource:
    key, device = "callbacks.emergency_save.source", str(watched.device)
    with constructing(key, node):
        source = instantiate(node, rank=watched.rank, device=device, _convert_="all")
    if not isinstance(source, TelemetrySource):
        raise ConfigError(
            f"{key} must have the methods read and close; {node._target_} made a "
            f"{type(source).__name__}."
        )
    return source


def _nvml(device: torch.device) -> NvmlTelemetry:
    """The device by what it calls itself: its number here depends on CUDA_VISIBLE_DEVICES."""
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    bus = (getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
    return NvmlTelemetry(
        uuid=str(uuid) if uuid is not None else None,
        pci_bus_id="{:08x}:{:02x}:{:02x}.0".format(*bus),
        reusable_bytes=partial(_reusable_bytes, device),
    )


def _reusable_bytes(device: torch.device) -> int:
    return int(torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _tell(rank: int, text: str) -> None:
    print(f"rank {rank}: {text}. Training goes on without it.", file=sys.stderr, flush=True)
