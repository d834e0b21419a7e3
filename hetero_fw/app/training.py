"""Compose strategy, callbacks and trainer of one rank, train, and leave the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig
from typing_extensions import override

from hetero_fw.app.build import (
    build_callbacks,
    build_loggers,
    build_module,
    build_train_data,
    build_val_data,
    init_weights,
    interval_rule,
)
from hetero_fw.app.emergency import WatchedRank, build_emergency_save
from hetero_fw.app.state import collect_state, newest_metric, restore_state
from hetero_fw.callbacks import AdaptiveCheckpoint, EmergencySave, StepRecorder, read_facts
from hetero_fw.checkpoint import (
    AttemptDirectories,
    CheckpointSaver,
    buffer_names,
    claim_attempt,
    find_restorable,
    flatten_training_state,
    read_manifest,
    restore_training_state,
    weights_digest,
)
from hetero_fw.errors import ConfigError
from hetero_fw.monitoring import (
    EventLog,
    EventName,
    MetricsWriter,
    RunDirectory,
    ScalarWriter,
    StepPrinter,
    read_events,
    write_json_atomically,
)
from hetero_fw.parallel import Exchange
from hetero_fw.planning import ParallelPlan
from hetero_fw.policies import IntervalPolicy, MonitorMode, RetentionRule
from hetero_fw.profiling import Pacer
from hetero_fw.recovery import RankEnd, SaveRequest, StopRequest
from hetero_fw.strategies import HeteroFSDPStrategy, HeteroPrecision


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


def train(context: RankContext) -> RankEnd:
    """Train to `trainer.max_steps` or to a stop request; every rank calls this once."""
    cfg = context.cfg
    path = _agree_on_checkpoint(context)
    start_step = read_manifest(path).step if path is not None else 0
    module = build_module(cfg)
    if path is None:
        init_weights(cfg, module)
    strategy = _build_strategy(context)
    saver = _build_saver(context)
    checkpointing = _build_checkpointing(context, strategy, module, saver, start_step)
    emergency = _build_emergency(context, strategy, checkpointing)
    strategy.make_notes = _all_notes(checkpointing, *emergency)
    trainer = _build_trainer(
        context,
        strategy,
        [
            _Restore(context, path, start_step),
            *build_callbacks(cfg),
            *_recorders(context, strategy, start_step),
            checkpointing,
            *emergency,
        ],
    )
    _set_step(trainer, start_step)
    trainer.fit(
        module,
        build_train_data(cfg, context.plan, context.rank, start_step=start_step),
        build_val_data(cfg, context.plan, context.rank),
    )
    # Not after an exception: a save in flight needs all ranks, and waiting for them would hold up
    # the report of what went wrong.
    if saver is not None:
        saver.close(timeout_s=cfg.recovery.process_group_timeout_s)
    if checkpointing.was_preempted:
        return RankEnd.PREEMPTED
    digest = weights_digest(module)
    if context.rank == 0:
        result = {"step": trainer.global_step, "weights_digest": digest}
        write_json_atomically(context.run_dir.attempt_path(context.attempt) / "result.json", result)
    return RankEnd.DONE


def _agree_on_checkpoint(context: RankContext) -> Path | None:
    """Rank 0 finds the newest checkpoint that verifies; all ranks use that one."""
    found: list[str | None] = [None]
    if context.rank == 0:
        root, prefix = context.run_dir.checkpoints_path, context.cfg.ckpt.prefix
        if context.cfg.ckpt.policy != IntervalPolicy.NONE or root.is_dir():
            # First of all: no earlier attempt changes anything from here on, and a replacement
            # that was cut short in the middle is put back.
            claim_attempt(root, context.attempt)
        info = find_restorable(root, prefix, on_rejected=_log_rejected(context.events))
        found = [str(info.path) if info is not None else None]
        if context.attempt > 0:
            print(f"continuing from {info.path.name if info else 'step 0'}", flush=True)
    if context.group is not None:
        dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        _check_fresh_start(context)
        return None
    return Path(found[0])


def _check_fresh_start(context: RankContext) -> None:
    """Refuse to start over what `resume=must` wants continued; the supervisor saw checkpoints."""
    if context.cfg.resume == "must":
        raise ConfigError(
            f"resume=must, but no checkpoint in {context.run_dir.checkpoints_path} could be "
            "verified; events.jsonl has a checkpoint_rejected for each. Use resume=auto to start "
            "fresh."
        )


def _log_rejected(events: EventLog) -> Callable[[Path, str], None]:
    def log(path: Path, reason: str) -> None:
        step = int(path.name.rpartition("-")[2])
        events.write(EventName.CHECKPOINT_REJECTED, step=step, path=str(path), reason=reason)
        print(f"checkpoint rejected: {reason}", flush=True)

    return log


def _build_strategy(context: RankContext) -> HeteroFSDPStrategy:
    plan, rank = context.plan, context.plan.ranks[context.rank]

    def on_skipped(step: int, norm: float) -> None:
        context.events.write(EventName.STEP_SKIPPED, step=step, grad_norm=norm)

    return HeteroFSDPStrategy(
        plan=plan,
        rank=context.rank,
        device=context.device,
        exchange=context.exchange,
        precision=HeteroPrecision(
            precision=plan.compute_precision,
            device_type=context.device.type,
            on_skipped=on_skipped,
        ),
        seed=context.cfg.seed,
        pacer=Pacer(rank.compute_s) if plan.emulation is not None else None,
    )


def _build_saver(context: RankContext) -> CheckpointSaver | None:
    cfg = context.cfg.ckpt
    if cfg.policy == IntervalPolicy.NONE:
        return None

    def on_event(name: str, step: int, fields: dict[str, Any]) -> None:
        context.events.write(name, step=step, **fields)

    return CheckpointSaver(
        directories=AttemptDirectories(
            root=context.run_dir.checkpoints_path, attempt=context.attempt
        ),
        prefix=cfg.prefix,
        rank=context.rank,
        world_size=context.plan.world_size,
        store=context.store if context.plan.world_size > 1 else None,
        process_group=_new_group(context),
        is_async=cfg.async_mode == "async",
        plan_fingerprint=context.plan.fingerprint(),
        on_event=on_event,
        retention=RetentionRule(
            keep_latest_k=cfg.keep_latest_k,
            keep_best=cfg.keep_best,
            monitor=cfg.monitor,
            monitor_mode=MonitorMode(cfg.monitor_mode),
            keep_every_n_steps=cfg.keep_every_n_steps,
        ),
    )


def _new_group(context: RankContext) -> dist.ProcessGroup | None:
    """A group for checkpoints alone: control traffic of steps must never wait for a save."""
    if context.group is None:
        return None
    timeout = timedelta(seconds=context.cfg.recovery.process_group_timeout_s)
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _build_checkpointing(
    context: RankContext,
    strategy: HeteroFSDPStrategy,
    module: pl.LightningModule,
    saver: CheckpointSaver | None,
    start_step: int,
) -> AdaptiveCheckpoint:
    saves_optimizer = context.cfg.ckpt.save_optimizer_states
    rule = interval_rule(context.cfg)

    def save(step: int, reason: str) -> None:
        assert saver is not None
        optimizer = strategy.optimizers[0] if saves_optimizer else None
        tensors, state = flatten_training_state(module, optimizer)
        saver.save(
            step,
            tensors,
            {**state, **collect_state(module.trainer)},
            reason=reason,
            metric=newest_metric(
                context.cfg.ckpt.monitor,
                module.trainer.callback_metrics,
                strategy.finished_step.loss,
            ),
            may_be_infinite=buffer_names(module),
        )

    return AdaptiveCheckpoint(
        source=strategy,
        saver=saver,
        rule=rule,
        history=read_facts(
            read_events(context.run_dir.events_path), context.plan, rule.prior_mtbf_s
        ),
        save=save,
        stop=context.stop,
        events=context.events,
        first_step=start_step,
        max_steps=context.cfg.trainer.max_steps,
        rank=context.rank,
    )


def _build_emergency(
    context: RankContext, strategy: HeteroFSDPStrategy, checkpointing: AdaptiveCheckpoint
) -> list[EmergencySave]:
    """The callback for emergency saves, if there is anything to save to."""
    if context.cfg.ckpt.policy == IntervalPolicy.NONE:
        return []
    built = build_emergency_save(
        context.cfg.callbacks.emergency_save,
        WatchedRank(
            rank=context.rank,
            local_rank=context.plan.ranks[context.rank].local_rank,
            device=context.device,
        ),
        source=strategy,
        checkpointing=checkpointing,
        signals=context.save,
        events=context.events,
    )
    return [built] if built is not None else []


def _all_notes(*noting: AdaptiveCheckpoint | EmergencySave) -> Callable[[], dict[str, float]]:
    """What all of them add to the report of a step."""

    def notes() -> dict[str, float]:
        return {name: value for item in noting for name, value in item.notes().items()}

    return notes


def _recorders(
    context: RankContext, strategy: HeteroFSDPStrategy, start_step: int
) -> list[Callback]:
    if context.rank != 0:
        return []
    groups = list(dict.fromkeys(rank.group for rank in context.plan.ranks))
    monitor = context.cfg.monitor
    return [
        StepRecorder(
            source=strategy,
            metrics=MetricsWriter(
                context.run_dir.metrics_path,
                groups,
                attempt=context.attempt,
                resume_step=start_step,
            ),
            scalars=ScalarWriter(
                context.run_dir.validation_path, attempt=context.attempt, resume_step=start_step
            ),
            printer=StepPrinter(
                monitor.progress, context.cfg.trainer.max_steps, monitor.line_interval_steps
            ),
        )
    ]


def _build_trainer(
    context: RankContext, strategy: HeteroFSDPStrategy, callbacks: list[Callback]
) -> pl.Trainer:
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


class _Restore(Callback):
    """Fills module, optimizer and trainer from a checkpoint once they are set up."""

    def __init__(self, context: RankContext, path: Path | None, step: int) -> None:
        self._context = context
        self._path = path
        self._step = step

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not on_train_start, which does not come where the last step is complete already.
        if self._path is None:
            return
        state = restore_training_state(
            pl_module,
            trainer.optimizers[0],
            self._path,
            process_group=self._context.group,
        )
        restore_state(trainer, state)
        if self._context.rank == 0:
            self._context.events.write(EventName.RESTORED, step=self._step, source=str(self._path))
