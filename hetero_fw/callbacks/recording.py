"""Write down every step and show it; rank 0 does, the others have nothing to add."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from hetero_fw.monitoring import MetricsWriter, ScalarWriter, StepPrinter, StepRecord
from hetero_fw.parallel import StepResult, StepSource
from hetero_fw.planning import ParallelPlan


class StepRecorder(Callback):
    """One row of `metrics.csv` and one line or bar update for each optimizer step.

    Args:
        source: the strategy.
        metrics: rows of steps.
        scalars: rows of validation results.
        printer: what a person sees.
    """

    def __init__(
        self,
        *,
        source: StepSource,
        metrics: MetricsWriter,
        scalars: ScalarWriter,
        printer: StepPrinter,
    ) -> None:
        self._source = source
        self._metrics = metrics
        self._scalars = scalars
        self._printer = printer
        self._began_s = 0.0
        self._lr = 0.0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began_s = time.perf_counter()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._lr = float(trainer.optimizers[0].param_groups[0]["lr"])

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        now_s = time.perf_counter()
        step_time_s, self._began_s = now_s - self._began_s, now_s
        record = _record(
            self._source.finished_step,
            self._source.plan,
            step=trainer.global_step,
            lr=self._lr,
            step_time_s=step_time_s,
            loss_scale=self._source.loss_scale,
        )
        self._metrics.write(record)
        self._printer.update(record)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        values = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if name.startswith("val")
        }
        if values:
            self._scalars.write(trainer.global_step, values)
            text = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
            self._printer.message(f"validation after step {trainer.global_step}  {text}")
        # Time spent validating belongs to no step.
        self._began_s = time.perf_counter()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._printer.close()
        self._metrics.close()
        self._scalars.close()


def _record(
    result: StepResult,
    plan: ParallelPlan,
    *,
    step: int,
    lr: float,
    step_time_s: float,
    loss_scale: float | None,
) -> StepRecord:
    """What the step looked like over all ranks."""
    compute_s: dict[str, float] = {}
    for rank, report in zip(plan.ranks, result.reports, strict=True):
        compute_s[rank.group] = max(report.compute_s, compute_s.get(rank.group, 0.0))
    return StepRecord(
        step=step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=lr,
        num_samples=plan.global_batch_size,
        num_targets=result.num_targets,
        step_time_s=step_time_s,
        memory_bytes=int(max(report.memory_bytes for report in result.reports)),
        compute_s_by_group=compute_s,
        loss_scale=loss_scale,
        emulation_stretch=result.stretch,
    )
