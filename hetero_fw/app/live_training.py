"""What of one rank's training goes into its checkpoints."""

from __future__ import annotations

from functools import cached_property

import lightning.pytorch as pl
import torch

from hetero_fw.app.context import RankContext
from hetero_fw.app.state import collect_state, newest_metric
from hetero_fw.checkpoint import LiveState, Metric, SaveContent, StandingStep
from hetero_fw.errors import CheckpointError
from hetero_fw.strategies import HeteroFSDPStrategy


class LiveTraining:
    """Asked at step boundaries, by the thread that trains."""

    def __init__(
        self, context: RankContext, strategy: HeteroFSDPStrategy, module: pl.LightningModule
    ) -> None:
        self._context = context
        self._strategy = strategy
        self._module = module

    @cached_property
    def live(self) -> LiveState:
        """The module's tensors and its optimizer's, by name."""
        return LiveState(self._module, self._strategy.optimizers[0])

    def content(self, step: int, reason: str) -> SaveContent:
        """What a save of the step that has just ended holds; its tensors are the live ones."""
        return self.stand(step).content(reason)

    def stand(self, step: int) -> StandingStep:
        """The step that has just ended, for as long as no weight changes."""
        live = self.live
        buffers, versions = live.copy_buffers(), live.versions()
        is_first = self._context.rank == 0
        state = collect_state(self._module.trainer) if is_first else {}
        metric = self._metric() if is_first else None

        def content(reason: str) -> SaveContent:
            if live.versions() != versions:
                raise CheckpointError("parameters that the optimizer leaves alone have changed")
            tensors, values = live.flatten(
                with_optimizer=self._context.cfg.ckpt.save_optimizer_states
            )
            return SaveContent(
                step=step,
                tensors=tensors | buffers,
                state=values | state,
                reason=reason,
                metric=metric,
                may_be_infinite=live.buffers,
            )

        return StandingStep(step=step, content=content, mark=self._mark())

    def _mark(self) -> torch.cuda.Event | None:
        device = self._context.device
        if device.type != "cuda":
            return None
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(device))
        return mark

    def _metric(self) -> Metric | None:
        name = self._context.cfg.ckpt.monitor
        if name is None:
            return None
        logged = self._module.trainer.callback_metrics
        return newest_metric(name, logged, step_loss=self._strategy.last_loss)
