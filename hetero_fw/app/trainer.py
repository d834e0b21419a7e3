"""Lightning's trainer, told to leave alone what ranks here do in another way."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from hetero_fw.app.build import build_loggers
from hetero_fw.app.context import RankContext
from hetero_fw.strategies import HeteroFSDPStrategy


def build_trainer(
    context: RankContext,
    strategy: HeteroFSDPStrategy,
    callbacks: list[Callback],
    *,
    start_step: int,
) -> pl.Trainer:
    """The trainer of this rank, which counts on from `start_step`."""
    cfg = context.cfg.trainer
    trainer = pl.Trainer(
        accelerator="cpu" if context.device.type == "cpu" else "cuda",
        strategy=strategy,
        devices=1,
        max_steps=cfg.max_steps,
        max_epochs=-1,
        callbacks=callbacks,
        logger=build_loggers(context.cfg, context.rank) or False,
        gradient_clip_val=cfg.gradient_clip_val,
        val_check_interval=cfg.val_interval_steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=context.cfg.monitor.line_interval_steps,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    # Lightning raises in the middle of the loop on SIGTERM, on the rank that got it alone; ranks
    # here agree on a stop at a step boundary (github.com/Lightning-AI/pytorch-lightning #20806).
    trainer._signal_connector.register_signal_handlers = _leave_signals  # type: ignore[method-assign]
    _set_step(trainer, start_step)
    return trainer


def _leave_signals() -> None:
    """Stands in for Lightning's registration of signal handlers."""


def _set_step(trainer: pl.Trainer, step: int) -> None:
    """Let Lightning count on from `step`; its own restore would want its own checkpoint."""
    loop = trainer.fit_loop.epoch_loop
    loop.automatic_optimization.optim_progress.optimizer.step.total.ready = step
    loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
    for name in ("ready", "started", "processed", "completed"):
        setattr(loop.batch_progress.total, name, step)
    loop._batches_that_stepped = step
    update = loop.update_lr_schedulers

    def update_by_steps(interval: str, update_plateau_schedulers: bool) -> None:
        # A schedule with a frequency goes by this count, which begins anew in each attempt.
        loop.batch_progress.current.ready += step
        try:
            update(interval, update_plateau_schedulers)
        finally:
            loop.batch_progress.current.ready -= step

    loop.update_lr_schedulers = update_by_steps  # type: ignore[method-assign]
