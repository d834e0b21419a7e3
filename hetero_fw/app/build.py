"""Build what a rank trains with from the configuration: module, optimizer, loaders, loggers."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hetero_fw.app.rules import AVERAGES_WEIGHTS
from hetero_fw.app.schema import Callbacks, keys_of
from hetero_fw.checkpoint import check_module, load_weights
from hetero_fw.data import RankPart, build_train_loader, build_val_loader
from hetero_fw.errors import CheckpointError, ConfigError
from hetero_fw.planning import ParallelPlan
from hetero_fw.policies import IntervalPolicy, IntervalRule, linear_scaled_lr
from hetero_fw.profiling import is_out_of_memory


def make(node: DictConfig | None, key: str) -> Any:
    """Instantiate a configuration node with plain containers as arguments.

    Args:
        node: has a `_target_`; None gives None.
        key: where the node stands in the configuration, for messages.

    Raises:
        ConfigError: the target cannot be imported or refuses its arguments. The same arguments
            are refused every time, so a restart would not help.
    """
    if node is None:
        return None
    with constructing(key, node):
        return instantiate(node, _convert_="all")


@contextlib.contextmanager
def constructing(key: str, node: DictConfig) -> Iterator[None]:
    """Turn what a constructor raises into one line about the configuration that called it."""
    try:
        yield
    except Exception as error:
        # Hydra wraps what a target raises; imports that failed it only tells in its message.
        cause = error.__cause__ if isinstance(error, InstantiationException) else error
        if isinstance(cause, ConfigError):
            raise cause from None
        is_passing = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
        if cause is not None and (is_passing or is_out_of_memory(cause)):
            raise cause from None
        name = "" if cause is None else f"{type(cause).__name__}: "
        text = " ".join(str(cause or error).split())
        raise ConfigError(f"{key} ({node._target_}): {name}{text}") from error


class OptimizerError(ConfigError):
    """The module asks for another way of optimizing than one optimizer that steps by itself."""


def build_module(cfg: DictConfig) -> pl.LightningModule:
    """The user's module with weights that depend on the seed alone, so that all ranks agree.

    Raises:
        ConfigError: it cannot be made, is of another kind, or is not trained with one optimizer;
            of several that its `configure_optimizers` returns, that tells when it is called.
    """
    torch.manual_seed(cfg.seed)
    _seed_besides_torch(cfg)
    module = make(cfg.model.module, "model.module")
    if not isinstance(module, pl.LightningModule):
        raise ConfigError(
            f"model.module must be a LightningModule; {cfg.model.module._target_} made a "
            f"{type(module).__name__}."
        )
    if not module.automatic_optimization:
        raise OptimizerError(
            f"model.module: {cfg.model.module._target_} has automatic_optimization=False, and only "
            "automatic optimization is supported. Let training_step return the loss."
        )
    if cfg.optim.optimizer is not None:
        module.configure_optimizers = _optimizer_hook(cfg, module)  # type: ignore[method-assign]
    elif not is_overridden("configure_optimizers", module):
        raise ConfigError(
            f"optim.optimizer=null, but {cfg.model.module._target_} has no configure_optimizers. "
            "Choose an optimizer, for example optim=adamw."
        )
    else:
        module.configure_optimizers = _own_optimizer(cfg, module.configure_optimizers)  # type: ignore[method-assign]
    return module


def _seed_besides_torch(cfg: DictConfig) -> None:
    """Seed what constructors may draw from: no two processes have these streams alike otherwise.

    Those of torch go on from what the module has drawn, which is the same in all processes.
    """
    np.random.seed(cfg.seed)
    random.seed(cfg.seed)


def build_without_values(cfg: DictConfig) -> pl.LightningModule | None:
    """The user's module on the meta device; None if it cannot be made there, which is no error."""
    try:
        with torch.device("meta"):
            return build_module(cfg)
    except Exception:  # noqa: BLE001  # the ranks make it with values, and say what is wrong
        return None


def check_kept(cfg: DictConfig, module: nn.Module) -> list[str]:
    """Refuse a module with state that checkpoints cannot hold, or that it does not take back.

    Returns:
        names of what it adds to its `state_dict` itself.

    Raises:
        ConfigError: of the module's state.
    """
    if cfg.ckpt.policy == IntervalPolicy.NONE:
        return []
    try:
        return check_module(module)
    except CheckpointError as error:
        raise ConfigError(f"model.module ({cfg.model.module._target_}): {error}") from error


def optimizer_problem(cfg: DictConfig) -> str:
    """What is wrong with the module's own optimizer; "" if nothing is, or if it cannot be seen."""
    try:
        with torch.device("meta"):
            build_module(cfg).configure_optimizers()
    except OptimizerError as error:
        return str(error)
    except Exception:  # noqa: BLE001  # the ranks make it with values, and say what is wrong
        return ""
    return ""


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
        make_optimizer = make(cfg.optim.optimizer, "optim.optimizer")
        parameters = [p for p in module.parameters() if p.requires_grad]
        with constructing("optim.optimizer", cfg.optim.optimizer):
            optimizer: Optimizer = make_optimizer(parameters)
        for group in optimizer.param_groups:
            group["lr"] = linear_scaled_lr(
                group["lr"], cfg.data.global_batch_size, cfg.optim.base_batch_size
            )
        if cfg.optim.scheduler is None:
            return optimizer
        make_scheduler = make(cfg.optim.scheduler, "optim.scheduler")
        with constructing("optim.scheduler", cfg.optim.scheduler):
            scheduler = make_scheduler(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    return configure_optimizers


def _own_optimizer(cfg: DictConfig, configure: Callable[[], Any]) -> Callable[[], Any]:
    """`configure_optimizers` of the module itself, which must return one."""

    @functools.wraps(configure)
    def configure_one() -> Any:
        made = configure()
        pair = isinstance(made, list | tuple) and len(made) == 2 and isinstance(made[0], list)
        found = made[0] if pair else made
        number = len(found) if isinstance(found, list | tuple) else int(found is not None)
        if number != 1:
            raise OptimizerError(
                f"model.module: configure_optimizers of {cfg.model.module._target_} returns "
                f"{number} optimizers, and one is supported. Give it groups of parameters instead."
            )
        return made

    return configure_one


def build_train_data(
    cfg: DictConfig, plan: ParallelPlan, rank: int, *, start_step: int
) -> DataLoader[Any]:
    """This rank's micro-batches of the steps after `start_step`."""
    _seed_besides_torch(cfg)
    return build_train_loader(
        make(cfg.data.train, "data.train"),
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
    _seed_besides_torch(cfg)
    return build_val_loader(
        make(cfg.data.val, "data.val"),
        rank=rank,
        world_size=plan.world_size,
        batch_size=cfg.data.val_batch_size,
        seed=cfg.seed,
        max_samples=None if limit is None else limit * cfg.data.val_batch_size,
        num_workers=cfg.data.num_workers,
    )


def build_loggers(cfg: DictConfig, rank: int) -> list[Logger]:
    """Lightning loggers of the group `logger`; rank 0 logs for all."""
    if rank != 0:
        return []
    nodes = (cfg.logger or {}).items()
    return [make(node, f"logger.{name}") for name, node in nodes if node is not None]


def build_callbacks(cfg: DictConfig) -> list[Callback]:
    """The user's callbacks, on every rank.

    Raises:
        ConfigError: one cannot be made, or cannot go on after a restart.
    """
    built_in = keys_of(Callbacks)
    made = {
        f"callbacks.{name}": make(node, f"callbacks.{name}")
        for name, node in cfg.callbacks.items()
        if name not in built_in and node is not None
    }
    if cfg.ckpt.policy != IntervalPolicy.NONE:
        ConfigError.collect(
            f"{key}: {type(callback).__name__} {AVERAGES_WEIGHTS}"
            for key, callback in made.items()
            if isinstance(callback, WeightAveraging)
        )
    return list(made.values())


def interval_rule(cfg: DictConfig) -> IntervalRule:
    """The group `ckpt` as the policy takes it."""
    prior_s = cfg.ckpt.prior_mtbf_s
    return IntervalRule(
        policy=IntervalPolicy(cfg.ckpt.policy),
        interval_steps=cfg.ckpt.interval_steps,
        first_save_step=cfg.ckpt.first_save_step,
        prior_mtbf_s=dict(prior_s) if isinstance(prior_s, DictConfig) else prior_s,
    )
