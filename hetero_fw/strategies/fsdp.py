"""Heterogeneous FSDP for Lightning: unequal shares of every batch, one exact gradient."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from hetero_fw.data import MicroBatch
from hetero_fw.parallel import (
    Exchange,
    StepReport,
    StepResult,
    apply_fsdp,
    build_mesh,
    fsdp_modules,
    local_gradients,
    set_gradient_sync,
    squared_norm,
)
from hetero_fw.planning import ParallelPlan, RankPlan
from hetero_fw.profiling import MemoryMeter, Pacer
from hetero_fw.strategies.accumulation import AccumulatedLoss, accumulate
from hetero_fw.strategies.environment import PlanEnvironment
from hetero_fw.strategies.precision import HeteroPrecision


class HeteroFSDPStrategy(ParallelStrategy):
    """Runs a `ParallelPlan` with FSDP2 on its ranks, or plainly on a single one.

    A batch is the list of this rank's micro-batches of one optimizer step. `training_step` of the
    module is called once for each and must return the mean loss over its loss terms; if the module
    has `num_targets(batch) -> int`, that is how many terms there are, else the samples count.

    Args:
        exchange: control traffic; all ranks use it in the same order.
        seed: with step and rank it seeds the random streams of each step, and of the hooks before
            it, so that a resumed run needs no stored generator state.
        pacer: holds a rank that stands in for an absent device to that device's speed.
        make_notes: called once per step for what this rank adds to its `StepReport`.
    """

    def __init__(
        self,
        *,
        plan: ParallelPlan,
        rank: int,
        device: torch.device,
        exchange: Exchange,
        precision: HeteroPrecision,
        seed: int,
        pacer: Pacer | None = None,
        make_notes: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        super().__init__(
            parallel_devices=[device],
            cluster_environment=PlanEnvironment(plan, rank),
            precision_plugin=precision,
        )
        self.plan = plan
        self.exchange = exchange
        self.pacer = pacer
        self._result: StepResult | None = None
        self.make_notes = make_notes
        self._device = device
        self._seed = seed
        self._memory = MemoryMeter()
        self._began_s = 0.0

    @property
    def rank_plan(self) -> RankPlan:
        return self.plan.ranks[self.global_rank]

    @property
    def precision(self) -> HeteroPrecision:
        """The precision plugin, by its own type."""
        plugin = self.precision_plugin
        assert isinstance(plugin, HeteroPrecision)
        return plugin

    @property
    def finished_step(self) -> StepResult:
        """The newest step as all ranks saw it."""
        assert self._result is not None, "no step has finished yet"
        return self._result

    @property
    def last_loss(self) -> float | None:
        """Loss of the newest step, None before the first."""
        return None if self._result is None else self._result.loss

    @property
    def loss_scale(self) -> float | None:
        """Factor on the loss, None where there is no scaling."""
        return self.precision.loss_scale_or_none

    @property
    def is_distributed(self) -> bool:
        """Lightning asks this of strategies it does not know."""
        return self.plan.world_size > 1

    @property
    @override
    def root_device(self) -> torch.device:
        return self._device

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self._device)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module.to(self._device)
        if self.plan.world_size > 1:
            mesh = build_mesh(self._device.type)
            apply_fsdp(module, mesh=mesh, zero_stage=self.plan.zero_stage)
        self.model = module
        self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        # Lightning clears gradients between training_step and backward; here backward happens
        # within training_step, so clearing is done before it and must not happen again.
        module.optimizer_zero_grad = _keep_gradients  # type: ignore[method-assign]

    @override
    def training_step(self, batch: list[MicroBatch], batch_idx: int) -> Tensor:
        """Compute this rank's share of a step up to the reduced gradients.

        The module's `batch_idx` is the step: Lightning's own count starts at 0 in each attempt.
        """
        module = self.lightning_module
        assert module is not None
        self._begin_step()
        step = module.trainer.global_step
        accumulated = accumulate(
            batch,
            exchange=self.exchange,
            count_targets=self._count_targets,
            forward=lambda part: self._forward(part, step),
            backward=self._backward,
        )
        self._result = self._finish_step(accumulated)
        return torch.tensor(self._result.loss, device=self._device)

    def seed_start(self) -> None:
        """Seed what hooks draw at the start of training: alike on all ranks, in every attempt."""
        seed_streams("start", self._seed)

    def seed_batch(self) -> None:
        """Seed what hooks draw from when a step's batch has come until its `training_step`."""
        module = self.lightning_module
        assert module is not None
        seed_streams("batch", self._seed, module.trainer.global_step, self.global_rank)

    def _begin_step(self) -> None:
        module = self.lightning_module
        assert module is not None
        self._began_s = time.perf_counter()
        if self.pacer is not None and not self.pacer.is_open:
            self.pacer.open()
        seed_streams(self._seed, module.trainer.global_step, self.global_rank)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _count_targets(self, item: MicroBatch) -> int:
        count = getattr(self.lightning_module, "num_targets", None)
        return int(count(item.batch)) if count is not None else item.num_samples

    def _forward(self, batch: Any, batch_idx: int) -> Tensor:
        output = self._call("training_step", batch, batch_idx)
        loss = output["loss"] if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise TypeError(
                "training_step must return the mean loss as a tensor, alone or as 'loss' in a "
                f"dict; it returned {type(output).__name__}"
            )
        return loss

    def _backward(self, weighted_loss: Tensor, is_last: bool) -> None:
        assert self.model is not None
        set_gradient_sync(self.model, is_last=is_last, zero_stage=self.plan.zero_stage)
        (weighted_loss * self.precision.loss_scale.scale).backward()

    def _call(self, name: str, batch: Any, batch_idx: int) -> Any:
        """Call a step of the module through `forward`, where FSDP has its hooks."""
        module = self.lightning_module
        assert module is not None
        with self.precision.forward_context():
            if fsdp_modules(module):
                return self._forward_redirection(module, module, name, batch, batch_idx)
            return getattr(module, name)(batch, batch_idx)

    def _finish_step(self, accumulated: AccumulatedLoss) -> StepResult:
        """Hold to the emulated speed, then learn what the other ranks have got."""
        assert self.model is not None
        # On an accelerator this waits for the gradients, so it belongs to the time of computing.
        norm_squared = squared_norm(local_gradients(self.model.parameters()))
        stretch, compute_s = self._pace()
        notes = self.make_notes() if self.make_notes is not None else {}
        report = StepReport(
            loss=accumulated.local,
            squared_norm=norm_squared,
            compute_s=compute_s,
            memory_bytes=float(self._memory_bytes()),
            **notes,
        )
        reports = tuple(self.exchange.reports(report))
        if self.pacer is not None:
            self.pacer.open()
        norm = sum(item.squared_norm for item in reports) ** 0.5
        return StepResult(
            loss=sum(item.loss for item in reports),
            grad_norm=self.precision.observe_norm(norm),
            num_targets=accumulated.num_targets,
            reports=reports,
            stretch=stretch,
        )

    def _pace(self) -> tuple[float | None, float]:
        if self.pacer is None:
            return None, time.perf_counter() - self._began_s
        loads = [row[0] for row in self.exchange.all_gather([self.pacer.load()])]
        stretch = max(1.0, *loads)
        return stretch, self.pacer.hold(stretch)

    def exclude_from_pace(self, seconds: float) -> None:
        """Take time out of an emulated step in which its device would have stood still."""
        if self.pacer is not None:
            self.pacer.exclude(seconds)

    def _memory_bytes(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return self._memory.used_bytes()

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Gradients are there already; this only lets Lightning's hooks fire."""
        assert self.lightning_module is not None
        loss = self.precision.pre_backward(closure_loss, self.lightning_module)
        return self.precision.post_backward(loss, self.lightning_module)

    @override
    def validation_step(self, batch: MicroBatch, batch_idx: int) -> Any:
        return self._call("validation_step", batch.batch, batch_idx)

    @override
    def on_validation_start(self) -> None:
        # Callbacks may have put other weights in, averages say; what is gathered is the old ones.
        self._forget_gathered()

    @override
    def on_validation_end(self) -> None:
        self._forget_gathered()

    def _forget_gathered(self) -> None:
        """Have the next forward pass gather the weights as they are now."""
        assert self.model is not None
        for module in fsdp_modules(self.model):
            module.reshard()

    @override
    def barrier(self, name: str | None = None) -> None:
        if self.plan.world_size > 1:
            self.exchange.all_gather([0.0])

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.plan.world_size == 1:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if isinstance(tensor, Tensor):
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: checkpoints are written by `hetero_fw.checkpoint`, sharded and verified."""
        return {}

    @override
    def teardown(self) -> None:
        assert self.accelerator is not None
        self.precision_plugin.teardown()
        self.accelerator.teardown()


def seed_streams(*key: int | str) -> None:
    """Seed torch on all devices, numpy and random: a pure function of `key`."""
    value = zlib.crc32("/".join(map(str, key)).encode())
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def _keep_gradients(*args: Any, **kwargs: Any) -> None:
    """Stands in for `LightningModule.optimizer_zero_grad`."""
