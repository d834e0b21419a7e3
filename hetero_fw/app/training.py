"""Compose strategy, callbacks and trainer of one rank, train, and leave the results."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from hetero_fw.app.build import (
    build_callbacks,
    build_module,
    build_train_data,
    build_val_data,
    check_kept,
    init_weights,
)
from hetero_fw.app.context import RankContext
from hetero_fw.app.emergency import WatchedRank, build_emergency_save
from hetero_fw.app.live_training import LiveTraining
from hetero_fw.app.node_tier import clear_node_directory
from hetero_fw.app.places import leave_place
from hetero_fw.app.restore import Restore, Wasted
from hetero_fw.app.restoring import build_restore_watch, claim_and_search, next_checkpoint
from hetero_fw.app.saving import (
    build_checkpointing,
    build_just_in_time,
    build_saver,
    build_schedules,
    is_stored,
    longest_save_s,
)
from hetero_fw.app.space import check_space_of
from hetero_fw.app.trainer import build_trainer
from hetero_fw.callbacks import (
    AdaptiveCheckpoint,
    EmergencySave,
    StepBoundary,
    StepRecorder,
)
from hetero_fw.checkpoint import (
    CheckpointSaver,
    DamagedCheckpointError,
    FoundCheckpoint,
    weights_digest,
)
from hetero_fw.monitoring import (
    EventName,
    MetricsWriter,
    ScalarWriter,
    StepPrinter,
    write_json_atomically,
)
from hetero_fw.policies import IntervalPolicy
from hetero_fw.profiling import Pacer
from hetero_fw.recovery import RankEnd
from hetero_fw.strategies import HeteroFSDPStrategy, HeteroPrecision

# What a run that is told to stop still waits for older checkpoints to be read back.
_STOP_S = 2.0
_SILENCE_S = 5.0
_LOOK_S = 0.1


@dataclass(frozen=True, kw_only=True)
class _Training:
    """What was built to train from one checkpoint."""

    module: pl.LightningModule
    restore: Restore
    saver: CheckpointSaver | None
    checkpointing: AdaptiveCheckpoint
    callbacks: list[Callback]
    trainer: pl.Trainer
    start_step: int


def train(context: RankContext) -> RankEnd:
    """Train to `trainer.max_steps` or to a stop request; every rank calls this once."""
    candidates = claim_and_search(context)
    wasted = Wasted()
    while True:
        training = _build(context, next_checkpoint(context, candidates), wasted)
        damage = _fit(context, training)
        if damage is None:
            return _finish(context, training)
        # All ranks are here, before the first step: they build everything anew.
        wasted = wasted.plus(damage)
        del training, damage
        gc.collect()


def _build(context: RankContext, found: FoundCheckpoint | None, wasted: Wasted) -> _Training:
    cfg = context.cfg
    start_step = found.step if found is not None else 0
    module = build_module(cfg)
    _tell_added(context, check_kept(cfg, module))
    if found is None:
        if context.rank == 0:
            check_space_of(cfg, context.run_dir, module)
        init_weights(cfg, module)
    strategy = _build_strategy(context)
    saver = build_saver(context, module, start_step if found is not None else None)
    live = LiveTraining(context, strategy, module)
    schedules = build_schedules(context, saver, start_step)
    checkpointing = build_checkpointing(context, strategy, live, saver, schedules, start_step)
    emergency = _build_emergency(context, strategy, checkpointing)
    strategy.make_notes = _all_notes(checkpointing, *emergency)
    restore = Restore(context, found, wasted)
    just_in_time = build_just_in_time(context, live, saver, schedules, checkpointing.stand_still)
    boundary = StepBoundary(
        on_rest=[checkpointing.rest, *(part.rest for part in just_in_time)],
        on_end=checkpointing.end,
        on_move=[checkpointing.finish_staging, *(part.move for part in just_in_time)],
        on_start=strategy.seed_start,
        on_batch=strategy.seed_batch,
    )
    callbacks = [
        boundary,
        restore,
        *build_restore_watch(context, strategy, found),
        *build_callbacks(cfg),
        *_recorders(context, strategy, start_step),
        checkpointing,
        *emergency,
        *just_in_time,
    ]
    trainer = build_trainer(context, strategy, callbacks, start_step=start_step)
    return _Training(
        module=module,
        restore=restore,
        saver=saver,
        checkpointing=checkpointing,
        callbacks=callbacks,
        trainer=trainer,
        start_step=start_step,
    )


def _tell_added(context: RankContext, names: list[str]) -> None:
    """Sums of a metric, say: ranks have different ones, and may be others after a restart."""
    if names and context.rank == 0 and context.plan.world_size > 1:
        print(
            f"checkpoints hold {', '.join(names)} as rank 0 has them, "
            "and all ranks go on with that",
            flush=True,
        )


def _fit(context: RankContext, training: _Training) -> DamagedCheckpointError | None:
    """Returns what is wrong with the checkpoint, if training could not begin because of that."""
    cfg = context.cfg
    try:
        training.trainer.fit(
            training.module,
            build_train_data(cfg, context.plan, context.rank, start_step=training.start_step),
            build_val_data(cfg, context.plan, context.rank),
        )
    except DamagedCheckpointError as error:
        if error is not training.restore.damage:
            raise
        _take_down(context, training)
        return error.with_traceback(None)  # which holds on to the tensors
    return None


def _take_down(context: RankContext, training: _Training) -> None:
    """End what was built and never trained; Lightning leaves that out after an exception."""
    for callback in training.callbacks:
        callback.teardown(training.trainer, training.module, "fit")
    training.module.teardown("fit")
    _close(training, longest_save_s(context.cfg.ckpt))


def _await_reading(training: _Training, timeout_s: float) -> None:
    """Rank 0: until older checkpoints are gone, or a stop is asked for: nothing is lost then."""
    if training.saver is None:
        return
    began_s = time.monotonic()
    is_told = False
    while not training.saver.wait(_LOOK_S) and not training.checkpointing.is_asked_to_stop:
        taken_s = time.monotonic() - began_s
        if taken_s > timeout_s:
            return
        if taken_s > _SILENCE_S and not is_told:
            is_told = True
            print(
                f"{training.saver.safe.tell()}; older checkpoints go once newer ones are read "
                "back, which a signal ends"
            )


def _close(training: _Training, timeout_s: float) -> None:
    if training.saver is not None:
        training.saver.close(timeout_s)


def _finish(context: RankContext, training: _Training) -> RankEnd:
    """Leave the results. Not after an exception.

    A save in flight needs all ranks then, and waiting for them would hold up the report of what
    went wrong.
    """
    trainer = training.trainer
    if training.checkpointing.was_preempted:
        _close(training, _STOP_S)
        clear_node_directory(context, is_stored(context, trainer.global_step))
        return RankEnd.PREEMPTED
    longest_s = longest_save_s(context.cfg.ckpt)
    if context.rank != 0:
        _close(training, longest_s)
    digest = weights_digest(training.module)
    if context.rank == 0:
        # It may still read checkpoints back, for longer than others wait in a collective.
        _await_reading(training, longest_s)
        _close(training, _STOP_S)
    clear_node_directory(context, is_stored(context, trainer.global_step))
    if context.rank == 0:
        result = {"step": trainer.global_step, "weights_digest": digest}
        write_json_atomically(context.run_dir.attempt_path(context.attempt) / "result.json", result)
        leave_place(context.cfg, context.run_dir, context.attempt)  # all ranks have closed theirs
    return RankEnd.DONE


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
