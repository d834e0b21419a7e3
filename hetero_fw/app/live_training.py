"""What of one rank's training goes into its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import torch

from hetero_fw.app.checkpoint_hooks import ask_hooks, savers
from hetero_fw.app.context import RankContext
from hetero_fw.app.state import Monitored, collect_state, known_metrics
from hetero_fw.checkpoint import LiveState, SaveContent, StandingStep, check_dtypes, to_plain
from hetero_fw.errors import CheckpointError, ConfigError
from hetero_fw.strategies import HeteroFSDPStrategy


class LiveTraining:
    """Asked at step boundaries, by the thread that trains."""

    def __init__(
        self, context: RankContext, strategy: HeteroFSDPStrategy, module: pl.LightningModule
    ) -> None:
        self._context = context
        self._strategy = strategy
        self._module = module
        self._lost: set[str] = set()
        self._monitored = Monitored(context.cfg.ckpt.monitor, is_told=context.rank == 0)

    @cached_property
    def live(self) -> LiveState:
        """The module's tensors and its optimizer's, by name."""
        return LiveState(self._module, self._strategy.optimizers[0])

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors alone.

        Raises:
            ConfigError: no save can ever hold what is trained.
        """
        with _never_mended():
            return self._flatten()[0]

    def content(self, step: int, reason: str) -> SaveContent:
        """What a save of the step that has just ended holds; its tensors are the live ones.

        Raises:
            ConfigError: as `tensors`.
        """
        with _never_mended():
            content = self._content(step)(reason)
        try:
            added = ask_hooks(self._module.trainer, self._tell_lost)
        except CheckpointError as error:  # of the user's; it costs the save and not the training
            return replace(content, error=str(error))
        return replace(content, state={**content.state, **added})

    def stand(self, step: int) -> StandingStep:
        """The step that has just ended, for as long as no weight changes."""
        asked = savers(self._module.trainer)
        contents = None if asked else self._content(step)

        def content(reason: str) -> SaveContent:
            if contents is None:
                name = type(asked[0]).__name__
                raise CheckpointError(f"on_save_checkpoint of {name} is asked between steps only")
            found = contents(reason)
            if not found.is_unchanged():
                raise CheckpointError("weights were changed outside of the optimizer's step")
            return found

        return StandingStep(step=step, content=content, mark=self._mark())

    def _content(self, step: int) -> Callable[[str], SaveContent]:
        """Takes what changes soon as it is now, and the rest when a save for a reason is asked."""
        live, trainer = self.live, self._module.trainer
        buffers, versions = live.copy_buffers(), live.versions()
        state = collect_state(trainer, self._tell_lost) if self._context.rank == 0 else {}
        # On all ranks: what a module logs may be summed over them when it is asked for.
        # A copy, because Lightning goes on to fill its own with values of the next step.
        logged = dict(trainer.callback_metrics) if self._monitored.name is not None else {}
        known = known_metrics(trainer) if self._context.rank == 0 else {}
        loss = self._strategy.last_loss

        def content(reason: str) -> SaveContent:
            tensors, values = self._flatten(buffers)
            return SaveContent(
                step=step,
                tensors=tensors,
                state={**values, **state, "logged": to_plain(known, self._tell_lost, "logged")},
                reason=reason,
                metric=self._monitored.newest(step, logged, loss),
                may_be_infinite=frozenset(buffers),
                is_unchanged=lambda: live.versions() == versions,
            )

        return content

    def _tell_lost(self, what: str) -> None:
        if what not in self._lost:
            self._lost.add(what)
            print(f"checkpoints do not keep {what}", flush=True)

    def _flatten(
        self, buffers: Mapping[str, torch.Tensor] | None = None
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Live tensors and values.

        Args:
            buffers: as `LiveState.flatten` takes them.

        Raises:
            CheckpointError: no checkpoint can hold them.
        """
        tensors, values = self.live.flatten(
            with_optimizer=self._context.cfg.ckpt.save_optimizer_states,
            buffers=buffers,
            on_lost=self._tell_lost,
        )
        check_dtypes(tensors)
        return tensors, values

    def _mark(self) -> torch.cuda.Event | None:
        device = self._context.device
        if device.type != "cuda":
            return None
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(device))
        return mark


@contextmanager
def _never_mended() -> Iterator[None]:
    """A training that no save can hold ends: it would be lost with the first failure."""
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(
            f"{error}. Change that, or train without checkpoints (ckpt=none)."
        ) from error
