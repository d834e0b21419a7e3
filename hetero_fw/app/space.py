"""Refuse a run whose checkpoints do not fit, with the numbers, before it trains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from hetero_fw.errors import ConfigError
from hetero_fw.hardware import WorkloadProfile
from hetero_fw.monitoring import RunDirectory, Status, available_memory_bytes, read_status
from hetero_fw.policies import IntervalPolicy

if TYPE_CHECKING:
    from torch import nn

# Weights and their optimizer state are kept in fp32 whatever the ranks compute in.
_WEIGHT_BYTES = 4


def check_space(cfg: DictConfig, workload: WorkloadProfile, previous: RunDirectory | None) -> None:
    """Before any process starts, judge by what the model is said to hold.

    Args:
        previous: the run directory, if it is there already.

    Raises:
        ConfigError: two checkpoints do not fit where they go, or a copy of the state in memory.
    """
    if cfg.mode != "train" or cfg.ckpt.policy == IntervalPolicy.NONE or _is_done(cfg, previous):
        return
    root = Path(cfg.paths.root).expanduser().absolute()
    folder = previous.checkpoints_path if previous is not None else root
    per_param = _WEIGHT_BYTES + _optimizer_bytes(cfg, workload.optimizer_bytes_per_param)
    ConfigError.collect(_problems(cfg, folder, workload.num_params * per_param))


def check_space_of(cfg: DictConfig, folder: Path, module: nn.Module) -> None:
    """The same in a rank, by the module as it was built: its dtypes, and its buffers too.

    Raises:
        ConfigError: as above. A restart would meet the same.
    """
    if cfg.ckpt.policy == IntervalPolicy.NONE:
        return
    weight_bytes = sum(tensor.nbytes for tensor in module.state_dict().values())
    num_params = sum(p.numel() for p in module.parameters() if p.requires_grad)
    per_param = _optimizer_bytes(cfg, WorkloadProfile.optimizer_bytes_per_param)
    ConfigError.collect(_problems(cfg, folder, weight_bytes + num_params * per_param))


def _problems(cfg: DictConfig, folder: Path, checkpoint_bytes: int) -> list[str]:
    # Needs torch, as everything does from here on; a run that is not trained never comes here.
    from hetero_fw.checkpoint.space import SpaceDemand, shortfalls, survey

    try:
        volume = survey(folder, cfg.ckpt.prefix)
    except OSError:
        return []  # creating the run directory tells what is wrong with it
    demand = SpaceDemand(key="paths.root", checkpoint_bytes=checkpoint_bytes, volume=volume)
    return shortfalls(
        [demand],
        staging_bytes=checkpoint_bytes,  # all ranks are on this host
        available_memory_bytes=available_memory_bytes(),
    )


def _optimizer_bytes(cfg: DictConfig, otherwise: int) -> int:
    """State for each parameter in a checkpoint, as far as it is certain."""
    optimizer = cfg.optim.optimizer
    if not cfg.ckpt.save_optimizer_states or optimizer is None:
        return 0  # what the module's own optimizer keeps is not known
    if optimizer._target_.endswith(".SGD"):
        return _WEIGHT_BYTES if optimizer.get("momentum", 0) else 0
    return otherwise


def _is_done(cfg: DictConfig, previous: RunDirectory | None) -> bool:
    """Whether there is nothing left to train, and so nothing to save."""
    status = read_status(previous.status_path) if previous is not None else None
    return (
        status is not None
        and status.status is Status.DONE
        and status.step >= int(cfg.trainer.max_steps)
    )
