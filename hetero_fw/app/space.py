"""Refuse a run whose checkpoints do not fit, with the numbers, before it trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from hetero_fw.app.kept import finished_step
from hetero_fw.app.storage_settings import local_directory, storage_location
from hetero_fw.errors import ConfigError
from hetero_fw.hardware import WorkloadProfile
from hetero_fw.monitoring import RunDirectory, available_memory_bytes
from hetero_fw.planning import ParallelPlan
from hetero_fw.policies import IntervalPolicy

if TYPE_CHECKING:
    from torch import nn

_LOCAL_KEY = "ckpt.tiers.local"

# Weights and their optimizer state are kept in fp32 whatever the ranks compute in.
_WEIGHT_BYTES = 4


def check_node_tier(cfg: DictConfig, plan: ParallelPlan) -> None:
    """Judge before any process starts whether there are nodes for the copies.

    Raises:
        ConfigError: there are too few.
    """
    if cfg.ckpt.tiers.local is None or cfg.mode != "train":
        return
    num_nodes = len({rank.node for rank in plan.ranks})
    if num_nodes < cfg.ckpt.min_replica_size:
        raise ConfigError(
            f"ckpt.min_replica_size={cfg.ckpt.min_replica_size} needs as many nodes to keep "
            f"checkpoints in ckpt.tiers.local, but the plan has {num_nodes}. Lower it, or set "
            "ckpt.tiers.local=null."
        )


def check_space(cfg: DictConfig, workload: WorkloadProfile, previous: RunDirectory | None) -> None:
    """Before any process starts, judge by what the model is said to hold.

    Args:
        previous: the run directory, if it is there already.

    Raises:
        ConfigError: the checkpoints that every run needs do not fit where they go, or a copy of
            the state in memory. Where only some that are to be kept besides do not, it is told.
    """
    if cfg.mode != "train" or cfg.ckpt.policy == IntervalPolicy.NONE:
        return
    if previous is not None and finished_step(cfg, previous) is not None:
        return  # nothing left to train, and so nothing to save
    root = Path(cfg.paths.root).expanduser().absolute()
    folder = previous.checkpoints_path if previous is not None else root
    per_param = _WEIGHT_BYTES + _optimizer_bytes(cfg, workload.optimizer_bytes_per_param)
    name = previous.name if previous is not None else cfg.run_name or ".new"
    problems, warnings = _judge(cfg, folder, name, workload.num_params * per_param)
    ConfigError.collect(problems)
    for warning in warnings:
        print(warning, flush=True)


def check_space_of(cfg: DictConfig, run_dir: RunDirectory, module: nn.Module) -> None:
    """The same in a rank, by the module as it was built: its dtypes, and its buffers too.

    Raises:
        ConfigError: as above. A restart would meet the same.
    """
    if cfg.ckpt.policy == IntervalPolicy.NONE:
        return
    num_bytes = checkpoint_bytes_of(cfg, module)
    problems, _ = _judge(cfg, run_dir.checkpoints_path, run_dir.name, num_bytes)
    ConfigError.collect(problems)


def checkpoint_bytes_of(cfg: DictConfig, module: nn.Module) -> int:
    """Size of one checkpoint of `module`, before it is sharded, as far as it is certain."""
    weight_bytes = sum(int(tensor.nbytes) for tensor in module.state_dict().values())
    num_params = sum(p.numel() for p in module.parameters() if p.requires_grad)
    per_param = _optimizer_bytes(cfg, WorkloadProfile.optimizer_bytes_per_param)
    return weight_bytes + num_params * per_param


def _judge(
    cfg: DictConfig, folder: Path, run_name: str, checkpoint_bytes: int
) -> tuple[list[str], list[str]]:
    """What is too small, and what is only smaller than wanted."""
    # Needs torch, as everything does from here on; a run that is not trained never comes here.
    from hetero_fw.checkpoint.space import SpaceDemand, shortfalls, survey, tight_places

    demands = []
    for key, path, num_copies in _places(cfg, folder, run_name):
        try:
            volume = survey(path, cfg.ckpt.prefix)
        except OSError:
            continue  # using the directory tells what is wrong with it
        num_bytes = num_copies * checkpoint_bytes
        demand = SpaceDemand(key=key, checkpoint_bytes=num_bytes, volume=volume)
        if key != _LOCAL_KEY:  # where the least is kept
            num_best = cfg.ckpt.keep_best if cfg.ckpt.monitor is not None else 0
            demand = replace(
                demand,
                keep_latest_k=cfg.ckpt.keep_latest_k,
                num_besides=num_best,
                gives_way=True,
            )
        demands.append(demand)
    problems = shortfalls(
        demands,
        staging_bytes=checkpoint_bytes,  # all ranks are on this host
        available_memory_bytes=available_memory_bytes(),
    )
    return problems, tight_places(demands)


def _places(cfg: DictConfig, folder: Path, run_name: str) -> Iterator[tuple[str, Path, int]]:
    """Directories of this host that checkpoints go to: key, path and copies of each part."""
    location = storage_location(cfg, run_name)
    if location is None:
        yield "paths.root", folder, 1
    elif "://" not in location:
        yield "ckpt.storage", Path(location), 1
    local = local_directory(cfg, run_name)
    if local is not None:
        yield _LOCAL_KEY, local, cfg.ckpt.min_replica_size


def _optimizer_bytes(cfg: DictConfig, otherwise: int) -> int:
    """State for each parameter in a checkpoint, as far as it is certain."""
    optimizer = cfg.optim.optimizer
    if not cfg.ckpt.save_optimizer_states or optimizer is None:
        return 0  # what the module's own optimizer keeps is not known
    if optimizer._target_.endswith(".SGD"):
        return _WEIGHT_BYTES if optimizer.get("momentum", 0) else 0
    return otherwise
