"""What saves the training of one rank, and what decides when."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from omegaconf import DictConfig

from hetero_fw.app.build import interval_rule
from hetero_fw.app.context import RankContext
from hetero_fw.app.live_training import LiveTraining
from hetero_fw.app.node_tier import build_node_tier
from hetero_fw.app.places import build_place
from hetero_fw.app.space import checkpoint_bytes_of
from hetero_fw.callbacks import (
    AdaptiveCheckpoint,
    JustInTimeCheckpoint,
    TierSchedule,
    read_facts,
)
from hetero_fw.checkpoint import (
    CheckpointSaver,
    HashAlgorithm,
    JustInTimeSave,
    StandingStep,
    WriterProcess,
    check_dtypes,
)
from hetero_fw.errors import CheckpointError, ConfigError
from hetero_fw.monitoring import (
    EventName,
    label_log_lines,
    num_committed_saves,
    read_events,
    saves_on_line,
)
from hetero_fw.policies import IntervalPolicy, IntervalRule, MonitorMode, RetentionRule, Tier
from hetero_fw.recovery import die_with_parent
from hetero_fw.strategies import HeteroFSDPStrategy


def build_saver(
    context: RankContext, module: pl.LightningModule, safe_step: int | None
) -> CheckpointSaver | None:
    """What saves, None if nothing is saved. All ranks call this.

    Args:
        context: the rank.
        module: what is trained, before it is sharded.
        safe_step: step of the checkpoint that the attempt continues from, None if there is none.

    Raises:
        ConfigError: the module has dtypes that no checkpoint holds.
    """
    cfg = context.cfg.ckpt
    if cfg.policy == IntervalPolicy.NONE:
        return None
    try:
        check_dtypes(module.state_dict())
    except CheckpointError as error:
        raise ConfigError(
            f"model.module: {error}. Train without checkpoints (ckpt=none)."
        ) from error

    def on_event(name: str, step: int | None, fields: dict[str, Any]) -> None:
        context.events.write(name, step=step, **fields)
        if name in (EventName.CHECKPOINT_FAILED, EventName.WRITER_RESTART):
            print(fields.get("message", fields["reason"]), flush=True)

    if context.rank == 0 and not cfg.save_optimizer_states:
        print(
            "checkpoints hold weights only (ckpt.save_optimizer_states=false): what continues from "
            "one begins with an empty optimizer state",
            flush=True,
        )
    has_process = cfg.async_mode == "async_with_pinned_mem"
    begin_writer = functools.partial(_begin_writer, context.rank)
    node_tier = build_node_tier(context, checkpoint_bytes_of(context.cfg, module))
    return CheckpointSaver(
        place=build_place(context.cfg, context.run_dir, context.attempt),
        attempt=context.attempt,
        prefix=cfg.prefix,
        rank=context.rank,
        world_size=context.plan.world_size,
        store=context.store if context.plan.world_size > 1 else None,
        process_group=_new_group(context),
        is_async=cfg.async_mode != "disabled",
        executor=WriterProcess(begin_writer) if has_process else None,
        node_tier=node_tier,
        node_executor=WriterProcess(begin_writer) if has_process and node_tier else None,
        overlaps_staging=has_process,
        timeout_s=cfg.timeout_s,
        safe_step=safe_step,
        plan_fingerprint=context.plan.fingerprint(),
        hash=HashAlgorithm(cfg.hash),
        on_event=on_event,
        retention=RetentionRule(
            keep_latest_k=cfg.keep_latest_k,
            keep_best=cfg.keep_best,
            monitor=cfg.monitor,
            monitor_mode=MonitorMode(cfg.monitor_mode),
            keep_every_n_steps=cfg.keep_every_n_steps,
        ),
    )


def longest_save_s(ckpt: DictConfig) -> float:
    """Seconds after which every save has its verdict in every tier, whatever hung.

    Of each tier: the verdict comes within 4/3 of `ckpt.timeout_s`, an upload may have to wait as
    long for the one before it, and clearing up ends within the rest. Retention that
    takes longer is cut off there, and older checkpoints stay.
    """
    num_tiers = 1 if ckpt.tiers.local is None else 2
    return float(4.0 * num_tiers * ckpt.timeout_s)


def _begin_writer(rank: int) -> None:
    """First of all in the process that writes."""
    die_with_parent()
    label_log_lines(f"rank {rank}, writer")


def _new_group(context: RankContext) -> dist.ProcessGroup | None:
    """A group for checkpoints alone: control traffic of steps must never wait for a save."""
    if context.group is None:
        return None
    timeout = timedelta(seconds=context.cfg.recovery.process_group_timeout_s)
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def build_checkpointing(
    context: RankContext,
    strategy: HeteroFSDPStrategy,
    training: LiveTraining,
    saver: CheckpointSaver | None,
    schedules: Sequence[TierSchedule],
    start_step: int,
) -> AdaptiveCheckpoint:
    """The callback that asks the policy after each step, for every tier that there is."""

    def save(step: int, reason: str, tiers: Collection[Tier]) -> None:
        assert saver is not None
        # Everything else stays as it is until the optimizer's next step.
        changing = training.live.changing
        saver.save_content(training.content(step, reason), changing=changing, tiers=tiers)

    return AdaptiveCheckpoint(
        source=strategy,
        saver=saver,
        schedules=schedules,
        save=save,
        stop=context.stop,
        first_step=start_step,
        max_steps=context.cfg.trainer.max_steps,
        rank=context.rank,
        events=context.events,
        close_timeout_s=longest_save_s(context.cfg.ckpt),
    )


def build_schedules(
    context: RankContext, saver: CheckpointSaver | None, start_step: int
) -> list[TierSchedule]:
    """When to save to each tier that there is, nearest first."""
    if saver is None:
        return []
    rule = interval_rule(context.cfg)
    events = read_events(context.run_dir.events_path)
    history = read_facts(events, context.plan, rule.prior_mtbf_s)
    return [
        TierSchedule(
            tier,
            _rule_of(tier, rule, context.cfg.ckpt.tiers, has_local=Tier.LOCAL in saver.tiers),
            history,
            first_step=start_step if tier is saver.tiers[0] else _stored_step(events, start_step),
            max_steps=context.cfg.trainer.max_steps,
        )
        for tier in saver.tiers
    ]


def is_stored(context: RankContext, step: int) -> bool:
    """Whether this or an earlier attempt has brought `step` to the storage."""
    events = read_events(context.run_dir.events_path)
    return any(event["step"] == step for event in saves_on_line(events, Tier.STORAGE))


def build_just_in_time(
    context: RankContext,
    training: LiveTraining,
    saver: CheckpointSaver | None,
    schedules: Sequence[TierSchedule],
    stand_still: Callable[[float], None],
) -> list[JustInTimeCheckpoint]:
    """The callback that saves when a rank has raised, unless that is off."""
    emergency = context.cfg.callbacks.emergency_save
    if saver is None or emergency is None or emergency.exception_grace_s is None:
        return []

    is_prepared = False

    def stand(step: int) -> StandingStep:
        nonlocal is_prepared
        standing = training.stand(step)
        if not is_prepared:
            is_prepared = True
            began_s = time.perf_counter()
            # If it fails, so will the first save, which says why.
            with contextlib.suppress(CheckpointError, OSError):
                saver.prepare(training.tensors(), training.live.buffers)
            stand_still(time.perf_counter() - began_s)
        return standing

    return [
        JustInTimeCheckpoint(
            part=JustInTimeSave(
                saver,
                context.store if context.plan.world_size > 1 else None,
                rank=context.rank,
                world_size=context.plan.world_size,
            ),
            stand=stand,
            saver=saver,
            schedules=schedules,
            events=context.events,
            rank=context.rank,
            grace_s=emergency.exception_grace_s,
            is_last_attempt=context.cfg.recovery.max_restarts < 1,
        )
    ]


def _stored_step(events: Sequence[Mapping[str, Any]], start_step: int) -> int:
    """Newest step before `start_step` that an earlier attempt has brought to the storage.

    An attempt that continues from the nodes may have left the storage behind. If no attempt of
    this log has saved anything, the checkpoint at hand is the storage's.
    """
    if not num_committed_saves(events):
        return start_step
    stored = [event["step"] for event in saves_on_line(events, Tier.STORAGE)]
    return max((step for step in stored if step <= start_step), default=0)


def _rule_of(tier: Tier, rule: IntervalRule, tiers: DictConfig, *, has_local: bool) -> IntervalRule:
    """The storage behind node directories may have an interval of its own."""
    if tier is Tier.STORAGE and has_local and tiers.storage_interval_steps is not None:
        return IntervalRule(
            policy=IntervalPolicy.FIXED,
            interval_steps=tiers.storage_interval_steps,
            key="ckpt.tiers.storage_interval_steps",
        )
    return rule
