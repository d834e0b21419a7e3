"""What of one rank's training goes into its checkpoints."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import torch

from hetero_fw.app.context import RankContext
from hetero_fw.app.state import Monitored, collect_state
from hetero_fw.checkpoint import LiveState, SaveContent, StandingStep
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
        self._monitored = Monitored(context.cfg.ckpt.monitor, is_told=context.rank == 0)

    @cached_property
    def live(self) -> LiveState:
        """The module's tensors and its optimizer's, by name."""
        return LiveState(self._module, self._strategy.optimizers[0])

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors alone."""
        return self._flatten()[0]

    def content(self, step: int, reason: str) -> SaveContent:
        """What a save of the step that has just ended holds; its tensors are the live ones."""
        return self.stand(step).content(reason)

    def stand(self, step: int) -> StandingStep:
        """The step that has just ended, for as long as no weight changes."""
        live, trainer = self.live, self._module.trainer
        buffers, versions = live.copy_buffers(), live.versions()
        state = collect_state(trainer) if self._context.rank == 0 else {}
        # On all ranks: what a module logs may be summed over them when it is asked for.
        logged = trainer.callback_metrics if self._monitored.name is not None else {}
        loss = self._strategy.last_loss

        def content(reason: str) -> SaveContent:
            if live.versions() != versions:
                raise CheckpointError("parameters that the optimizer leaves alone have changed")
            tensors, values = self._flatten()
            return SaveContent(
                step=step,
                tensors=tensors | buffers,
                state=values | state,
                reason=reason,
                metric=self._monitored.newest(step, logged, loss),
                may_be_infinite=live.buffers,
            )

        return StandingStep(step=step, content=content, mark=self._mark())

    def _flatten(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return self.live.flatten(with_optimizer=self._context.cfg.ckpt.save_optimizer_states)

    def _mark(self) -> torch.cuda.Event | None:
        device = self._context.device
        if device.type != "cuda":
            return None
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(device))
        return mark
