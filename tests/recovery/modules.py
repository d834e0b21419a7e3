"""A GPT that breaks at a given step on a given rank, in the way a test asks for."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from hetero_fw.errors import ConfigError
from hetero_fw.parallel import local_tensor
from recipes.gpt import GPTModule

_CHUNK_BYTES = 2**28
_NUM_CHUNKS = 24
_WAIT_S = 30.0


def wait_for(path: Path) -> None:
    """Until it is there, but no longer than `_WAIT_S`."""
    deadline_s = time.monotonic() + _WAIT_S
    while not path.exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)


class FaultyGPT(GPTModule):
    """Otherwise `GPTModule`: the same names, the same weights.

    Args:
        fault: what happens; see `_FAULTS`.
        fail_step: step, counted from 1, in which it happens; 0: never.
        marker: file that the first failure leaves; nothing fails once it is there. None: always.
        awaited: what must be there before it happens, such as a checkpoint to fall back to.
    """

    def __init__(
        self,
        *,
        fault: str = "raise",
        fail_rank: int = 0,
        fail_step: int = 0,
        marker: str | None = None,
        awaited: str | None = None,
        **gpt: Any,
    ) -> None:
        super().__init__(**gpt)
        self._awaited = Path(awaited) if awaited is not None else None
        self._fault = fault
        self._fail_rank = fail_rank
        self._fail_step = fail_step
        self._marker = Path(marker) if marker is not None else None
        self._before: list[Tensor] = []

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        step = self.trainer.global_step + 1
        assert batch_idx == step - 1, "batch_idx counts steps, also after a restart"
        is_due = step == self._fail_step and self.global_rank == self._fail_rank
        loss = super().training_step(batch, batch_idx)
        if not is_due or (self._marker is not None and self._marker.exists()):
            return loss
        if self._awaited is not None:
            wait_for(self._awaited)
        if self._marker is not None:
            self._marker.touch()
        return _FAULTS[self._fault](loss)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._before = [local_tensor(p).detach().clone() for p in self.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        is_skipped = self._fault == "overflow" and self.trainer.global_step == self._fail_step
        after = [local_tensor(p).detach() for p in self.parameters()]
        is_same = all(map(torch.equal, self._before, after))
        assert is_same == is_skipped, "a skipped step, and no other, leaves the weights alone"


class RaisingGPT(GPTModule):
    """Raises in every step that `interval_steps` divides, once, each time on the next rank."""

    def __init__(self, *, interval_steps: int, folder: str, **gpt: Any) -> None:
        super().__init__(**gpt)
        self._interval_steps = interval_steps
        self._folder = Path(folder)

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        count, rest = divmod(self.trainer.global_step + 1, self._interval_steps)
        marker = self._folder / f"raised-{count}"
        if rest or self.global_rank != count % self.trainer.strategy.world_size or marker.exists():
            return loss
        marker.touch()
        raise RuntimeError("raised on purpose")


class DivergingGPT(GPTModule):
    """Its loss is not a number in the first steps after a restore of the checkpoint `bad_step`.

    Args:
        interrupt_step: step, counted from 1, that breaks the first attempt.
        awaited: what must be there before it breaks.
        marker: file that the broken attempt leaves.
    """

    def __init__(
        self, *, bad_step: int, interrupt_step: int, awaited: str, marker: str, **gpt: Any
    ) -> None:
        super().__init__(**gpt)
        self._bad_step = bad_step
        self._interrupt_step = interrupt_step
        self._awaited = Path(awaited)
        self._marker = Path(marker)
        self._first_step: int | None = None

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        step = self.trainer.global_step
        if self._first_step is None:
            self._first_step = step
        if step + 1 == self._interrupt_step and not self._marker.exists():
            self._interrupt()
        loss = super().training_step(batch, batch_idx)
        is_bad = self._first_step == self._bad_step and step > self._first_step
        return loss * float("nan") if is_bad else loss

    def _interrupt(self) -> None:
        wait_for(self._awaited)
        self._marker.touch()
        raise RuntimeError("interrupted on purpose")


class ShapedPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Has a function among its attributes, which no checkpoint can hold."""

    def __init__(self, optimizer: torch.optim.Optimizer, **plateau: Any) -> None:
        super().__init__(optimizer, **plateau)
        self.shape = lambda metric: metric

    def step(self, metrics: Any, epoch: Any = None) -> None:
        super().step(self.shape(metrics))


class HookedGPT(FaultyGPT):
    """Does in its hooks what users do there: its results depend on every one of them.

    Its rate follows the validation, its weights shrink after each step, and it counts steps in
    what it adds to checkpoints itself.
    """

    def __init__(self, *, hook_fail_step: int = 0, **faulty: Any) -> None:
        super().__init__(**faulty)
        self._hook_fail_step = hook_fail_step
        self.num_seen = 0

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = ShapedPlateau(optimizer, mode="max", factor=0.5, patience=0)
        every = {"monitor": "val_loss", "interval": "step", "frequency": 6}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **every}}

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self._count()
        return batch

    def _count(self) -> None:
        self.num_seen += 1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Weights change in the last hook of a step: nothing is compared with these."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.num_seen == self.trainer.global_step, "what was added to a checkpoint is back"
        if self.trainer.global_step == self._hook_fail_step:
            self._raise_once()
        for parameter in self.parameters():
            local_tensor(parameter).mul_(0.99)

    def _raise_once(self) -> None:
        assert self._marker is not None
        if self.global_rank == self._fail_rank and not self._marker.exists():
            self._marker.touch()
            raise RuntimeError("raised in a hook")


class CountingGPT(HookedGPT):
    """Its count goes with the checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = (self.num_seen, "steps")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert isinstance(checkpoint["seen"], tuple)
        self.num_seen, _ = checkpoint["seen"]


class Remembering(torch.optim.SGD):
    """Its step depends on lists of tensors, pairs and numbers, and on a count of all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        self.state["count"] = self.state.get("count", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                seen = state.setdefault("seen", deque(maxlen=3))
                seen.append(parameter.grad.clone())
                counts = state.setdefault("counts", {1: (0.0,)})
                counts[1] = (counts[1][0] + 0.5,)
                parameter.sub_(sum(seen) * (group["lr"] / (self.state["count"] + counts[1][0])))
        return loss


class RememberingGPT(FaultyGPT):
    """Its optimizer keeps what torch's do not; its rate follows a validation of an earlier step."""

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = Remembering(self.parameters(), lr=1.0)
        schedule = ShapedPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        every = {"monitor": "val_loss", "interval": "step", "frequency": 2, "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **every}}


class ForgettingGPT(HookedGPT):
    """Its count is what the step says."""

    def _count(self) -> None:
        self.num_seen = self.trainer.global_step + 1


class DrawingGPT(FaultyGPT):
    """Draws random numbers in every hook around its steps; its weights depend on all of them."""

    def __init__(self, **faulty: Any) -> None:
        super().__init__(**faulty)
        self._constant = 0.0
        self._drawn: list[float] = []

    def on_train_start(self) -> None:
        self._constant = float(torch.rand(1)) + random.random() + np.random.rand()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self._drawn = [random.random()]
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self._drawn.append(np.random.rand())
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._drawn.append(float(torch.rand(1)))

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        drawn = [*self._drawn, self._constant, float(torch.rand(1)), random.random()]
        assert len(drawn) == len(set(drawn)), "what is drawn before a step is not drawn in it again"
        return super().training_step(batch, batch_idx) * sum(drawn)

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Any:
        torch.rand(1)
        return super().validation_step(batch, batch_idx)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            local_tensor(parameter).mul_(1.0 - 0.1 * random.random())


class OtherWeights(pl.Callback):
    """Evaluates with other weights, as exponential averages do.

    Args:
        fail_step: validation after it in which the first rank raises, unless `marker` is there.
        folder: of the checkpoints; a validation waits for the save after the one before it, which
            would postpone its own.
    """

    def __init__(
        self, *, fail_step: int = 0, marker: str | None = None, folder: str | None = None
    ) -> None:
        self._fail_step = fail_step
        self._folder = Path(folder) if folder is not None else None
        self._previous: str | None = None
        self._marker = Path(marker) if marker is not None else None
        self._kept: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        own = [local_tensor(parameter) for parameter in pl_module.parameters()]
        self._kept = [(tensor, tensor.clone()) for tensor in own]
        for tensor in own:
            tensor.zero_()
        is_due = trainer.global_step == self._fail_step and trainer.global_rank == 0
        if is_due and self._marker is not None and not self._marker.exists():
            self._marker.touch()
            raise RuntimeError("raised in a validation")
        if self._folder is not None and self._previous is not None:
            wait_for(self._folder / self._previous)
        self._previous = f"hetero_ckpt-step-{trainer.global_step:08d}"
        time.sleep(0.2)  # in which a save that had begun would be copied

    @torch.no_grad()
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for tensor, own in self._kept:
            tensor.copy_(own)


class ListingGPT(GPTModule):
    """Lists the samples that each step uses in a file of its process in `folder`."""

    def __init__(self, *, folder: str, **gpt: Any) -> None:
        super().__init__(**gpt)
        self._folder = Path(folder)

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        samples = [bytes(row).decode() for row in batch["input_ids"].tolist()]
        with (self._folder / f"{os.getpid()}.txt").open("a") as file:
            file.writelines(f"{self.trainer.global_step + 1} {sample}\n" for sample in samples)
        return super().training_step(batch, batch_idx)


class Ledger(pl.Callback):
    """Its state is made of what callbacks keep, and of the step; says where it got it back.

    Args:
        folder: gets a file of the name `<step>-<rank>` if the state of a restored step is exact.
    """

    def __init__(self, *, folder: str) -> None:
        self._folder = Path(folder)
        self._state = self._after(0)

    @staticmethod
    def _after(step: int) -> dict[str, Any]:
        return {
            "steps": (step, ("named", None)),
            "a dict": {"z": [step], "a": {step: 0.5, (step, 1): "pair"}},
            "recent": deque(range(step), maxlen=4),
            "generator": random.Random(step).getstate(),
        }

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step = trainer.global_step
        assert repr(self._state) == repr(self._after(step))  # types and the order of keys as well
        (self._folder / f"{step}-{trainer.global_rank}").touch()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._state = self._after(trainer.global_step)


class LingeringGPT(GPTModule):
    """Leaves a thread behind that never ends, as a logger that waits for its server does."""

    def on_fit_end(self) -> None:
        threading.Thread(target=threading.Event().wait, name="lingers").start()


class OwnOptimizerGPT(GPTModule):
    """Brings its own optimizer."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TwoOptimizersGPT(GPTModule):
    """Brings two optimizers, which only a module that steps them itself can have."""

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return [torch.optim.SGD(parameters[:1], lr=0.1), torch.optim.SGD(parameters[1:], lr=0.1)]


class ManualGPT(OwnOptimizerGPT):
    """Steps its optimizer itself."""

    def __init__(self, **gpt: Any) -> None:
        super().__init__(**gpt)
        self.automatic_optimization = False


class NoModule(torch.nn.Module):
    """Not a LightningModule."""

    def __init__(self, **gpt: Any) -> None:
        super().__init__()


class PackedGPT(GPTModule):
    """Has numbers of four bits."""

    def __init__(self, **gpt: Any) -> None:
        super().__init__(**gpt)
        self.register_buffer("codes", torch.empty(3, dtype=torch.uint4))


class OwnAverages(pl.callbacks.WeightAveraging):
    """Derives from what averages weights."""


class BreakOnce(pl.Callback):
    """Raises at the end of `step` on rank 0, unless the file `marker` is there."""

    def __init__(self, *, step: int, marker: str) -> None:
        self._step = step
        self._marker = Path(marker)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        is_due = trainer.global_rank == 0 and trainer.global_step == self._step
        if is_due and not self._marker.exists():
            self._marker.touch()
            raise RuntimeError("broken once")


def _raise(loss: Tensor) -> Tensor:
    raise RuntimeError("broken on purpose")


def _stop_and_raise(loss: Tensor) -> Tensor:
    """As a batch system and a bug do that come at the same moment."""
    os.killpg(os.getpgrp(), signal.SIGTERM)
    raise RuntimeError("broken on purpose")


def _misconfigured(loss: Tensor) -> Tensor:
    raise ConfigError("data.paths: refused on purpose.")


def _overflow(loss: Tensor) -> Tensor:
    return loss * float("inf")


def _allocate(loss: Tensor) -> Tensor:
    """Ask for far more than was declared, without touching it: this machine has no more either."""
    held = [torch.empty(_CHUNK_BYTES, dtype=torch.uint8) for _ in range(_NUM_CHUNKS)]
    return loss + 0.0 * len(held)


def _hang(loss: Tensor) -> Tensor:
    threading.Event().wait()
    return loss


def _kill(loss: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return loss


_FAULTS = {
    "kill": _kill,
    "hang": _hang,
    "raise": _raise,
    "stop_and_raise": _stop_and_raise,
    "config": _misconfigured,
    "overflow": _overflow,
    "allocate": _allocate,
}
