"""Build what a rank trains with from the configuration: module, optimizer, loaders, loggers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hetero_fw.app.schema import Callbacks, keys_of
from hetero_fw.checkpoint import load_weights
from hetero_fw.data import RankPart, build_train_loader, build_val_loader
from hetero_fw.errors import CheckpointError, ConfigError
from hetero_fw.planning import ParallelPlan
from hetero_fw.policies import IntervalPolicy, IntervalRule, linear_scaled_lr


def make(node: DictConfig | None) -> Any:
    """Instantiate a configuration node with plain containers as arguments."""
    return None if node is None else instantiate(node, _convert_="all")


def build_module(cfg: DictConfig) -> pl.LightningModule:
    """The user's module with weights that depend on the seed alone, so that all ranks agree."""
    torch.manual_seed(cfg.seed)
    module = make(cfg.model.module)
    if not isinstance(module, pl.LightningModule):
        raise ConfigError(
            f"model.module must be a LightningModule; {cfg.model.module._target_} made a "
            f"{type(module).__name__}."
        )
    if cfg.optim.optimizer is not None:
        module.configure_optimizers = _optimizer_hook(cfg, module)  # type: ignore[method-assign]
    return module


def init_weights(cfg: DictConfig, module: pl.LightningModule) -> None:
    """Start from the weights in `model.init_from`, if it names a file; before sharding."""
    if cfg.model.init_from is None:
        return
    try:
        load_weights(module, Path(cfg.model.init_from).expanduser())
    except CheckpointError as error:
        raise ConfigError(f"model.init_from: {error}") from error


def _optimizer_hook(cfg: DictConfig, module: pl.LightningModule) -> Callable[[], Any]:
    """`configure_optimizers` by the group `optim`; it runs once the parameters are in place."""

    def configure_optimizers() -> Any:
        make_optimizer = make(cfg.optim.optimizer)
        optimizer: Optimizer = make_optimizer(p for p in module.parameters() if p.requires_grad)
        for group in optimizer.param_groups:
            group["lr"] = linear_scaled_lr(
                group["lr"], cfg.data.global_batch_size, cfg.optim.base_batch_size
            )
        if cfg.optim.scheduler is None:
            return optimizer
        scheduler = make(cfg.optim.scheduler)(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    return configure_optimizers


def build_train_data(
    cfg: DictConfig, plan: ParallelPlan, rank: int, *, start_step: int
) -> DataLoader[Any]:
    """This rank's micro-batches of the steps after `start_step`."""
    return build_train_loader(
        make(cfg.data.train),
        seed=cfg.seed,
        part=RankPart(shares=plan.shares, rank=rank, microbatches=plan.ranks[rank].microbatches),
        start_step=start_step,
        max_steps=cfg.trainer.max_steps,
        num_workers=cfg.data.num_workers,
        pin_memory=torch.cuda.is_available(),
    )


def build_val_data(cfg: DictConfig, plan: ParallelPlan, rank: int) -> DataLoader[Any] | None:
    """This rank's part of the validation set, None if the run does not validate."""
    if cfg.data.val is None or cfg.trainer.val_interval_steps is None:
        return None
    limit = cfg.trainer.limit_val_batches
    return build_val_loader(
        make(cfg.data.val),
        rank=rank,
        world_size=plan.world_size,
        batch_size=cfg.data.val_batch_size,
        seed=cfg.seed,
        max_samples=None if limit is None else limit * cfg.data.val_batch_size,
        num_workers=cfg.data.num_workers,
    )


def build_loggers(cfg: DictConfig, rank: int) -> list[Logger]:
    """Lightning loggers of the group `logger`; rank 0 logs for all."""
    nodes = [node for node in (cfg.logger or {}).values() if node is not None]
    return [make(node) for node in nodes] if rank == 0 else []


def build_callbacks(cfg: DictConfig) -> list[Callback]:
    """The user's callbacks, on every rank."""
    built_in = keys_of(Callbacks)
    nodes = [node for name, node in cfg.callbacks.items() if name not in built_in]
    return [make(node) for node in nodes if node is not None]


def interval_rule(cfg: DictConfig) -> IntervalRule:
    """The group `ckpt` as the policy takes it."""
    prior_s = cfg.ckpt.prior_mtbf_s
    return IntervalRule(
        policy=IntervalPolicy(cfg.ckpt.policy),
        interval_steps=cfg.ckpt.interval_steps,
        first_save_step=cfg.ckpt.first_save_step,
        prior_mtbf_s=dict(prior_s) if isinstance(prior_s, DictConfig) else prior_s,
    )
