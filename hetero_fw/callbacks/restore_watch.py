"""Watch the first steps after a restore: a checkpoint that makes training diverge is found out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from hetero_fw.errors import CheckpointError
from hetero_fw.parallel import Exchange, StepSource
from hetero_fw.policies import RestoredTraining, decide_divergence


class RestoreWatch(Callback):
    """Ends the attempt where the loss is not finite within a few steps of a restore.

    Comes before callbacks that save or record: such a step is not to count. The loss is the same
    on all ranks, so all end alike.

    Args:
        record: notes the step as held against the checkpoint; called on rank 0, before any rank
            ends.
        earlier_attempts: those that diverged after they restored the same checkpoint.
    """

    def __init__(
        self,
        *,
        source: StepSource,
        exchange: Exchange,
        rank: int,
        restored_step: int,
        attempt: int,
        earlier_attempts: tuple[int, ...],
        record: Callable[[int], None],
    ) -> None:
        self._source = source
        self._exchange = exchange
        self._rank = rank
        self._restored_step = restored_step
        self._attempt = attempt
        self._earlier_attempts = earlier_attempts
        self._record = record

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        decision = decide_divergence(
            RestoredTraining(
                restored_step=self._restored_step,
                step=trainer.global_step,
                loss=self._source.finished_step.loss,
                attempt=self._attempt,
                earlier_attempts=self._earlier_attempts,
            )
        )
        if decision.is_divergence:
            self._end(trainer.global_step, decision.reason)

    def _end(self, step: int, reason: str) -> None:
        try:
            if self._rank == 0:
                self._record(step)
        finally:
            # The first rank to end ends all of them, and the record must be there by then.
            self._exchange.all_gather([0.0])
        raise CheckpointError(reason)
