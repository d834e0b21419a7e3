"""One training, and the ways to save it that are compared: ours, DCP's three, Lightning's.

Each way is a function that takes the training and a folder and returns a `Method`. All of them save
the same tensors: parameters and AdamW state of an FSDP2 module, as names and DTensors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from typing_extensions import override

from hetero_fw.checkpoint import (
    AttemptDirectories,
    CheckpointSaver,
    DirectoryPlace,
    LiveState,
    SaveHandle,
    WriterProcess,
    claim_attempt,
    load_checkpoint,
)
from hetero_fw.policies import RetentionRule
from hetero_fw.recovery import die_with_parent
from hetero_fw.recovery.store import LOOPBACK

NUM_LAYERS = 17
LAYER_DIM = 2048
# Parameters and two moments of each, in fp32: 856 MB.
STATE_BYTES = NUM_LAYERS * LAYER_DIM**2 * 3 * 4
WAIT_S = 120.0
# The fewest there can be, so that nearly every save has an older checkpoint to delete.
KEEP = RetentionRule(keep_latest_k=2, keep_best=0)


class Training:
    """A sharded module in training; every rank has one."""

    def __init__(self, rank: int, group: dist.ProcessGroup, batch_size: int) -> None:
        self.rank = rank
        self.group = group
        self.module = sharded_stack(init_device_mesh("cpu", (group.size(),)))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4, foreach=True)
        self.live = LiveState(self.module, self.optimizer)
        self.batch = torch.randn(batch_size, LAYER_DIM)

    def step(self, before_optimizer_step: Callable[[], None] = lambda: None) -> float:
        """One step; returns how long `before_optimizer_step` held it up, in seconds."""
        self.optimizer.zero_grad()
        self.module(self.batch).square().mean().backward()
        began_s = time.perf_counter()
        before_optimizer_step()
        held_s = time.perf_counter() - began_s
        self.optimizer.step()
        return held_s

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.live.flatten()[0]

    def any_of(self, is_true: bool) -> bool:
        """Whether it is true on any rank."""
        flag = torch.tensor([float(is_true)])
        dist.all_reduce(flag, group=self.group)
        return bool(flag)


def sharded_stack(mesh: DeviceMesh) -> nn.Sequential:
    """Square layers without biases: nearly all of the state is in a few large tensors."""
    torch.manual_seed(0)
    layers = (nn.Linear(LAYER_DIM, LAYER_DIM, bias=False) for _ in range(NUM_LAYERS))
    module = nn.Sequential(*layers)
    for layer in module:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return module


class Pending(Protocol):
    """A save that may not be complete yet."""

    def wait(self, timeout_s: float) -> bool:
        """Whether it is complete, at the latest after `timeout_s`. Raises if it failed."""

    def persist_s(self) -> float:
        """How long it took from where training went on to the end; asked when it is complete."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to save.

    Attributes:
        save: returns when training may go on.
        before_optimizer_step: called before the weights change.
        path: where the checkpoint of a step lies.
        num_kept: checkpoints that it leaves, because it deletes the older ones itself; None: all.
    """

    name: str
    save: Callable[[int], Pending]
    path: Callable[[int], Path]
    before_optimizer_step: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    num_kept: int | None = None


def ours(training: Training, folder: Path, *, mode: str) -> Method:
    """CheckpointSaver, as `ckpt.async_mode` makes it.

    As in a run, each checkpoint is read back and verified before an older one goes.
    """
    rank, group = training.rank, training.group
    own = AttemptDirectories(root=folder, attempt=1)
    if rank == 0:
        claim_attempt(folder, 1)
    has_process = mode == "async_with_pinned_mem"
    saver = CheckpointSaver(
        place=DirectoryPlace(directories=own),
        attempt=1,
        prefix="ours",
        rank=rank,
        world_size=group.size(),
        store=_shared_store(rank, group),
        process_group=group,
        is_async=mode != "disabled",
        executor=WriterProcess(die_with_parent) if has_process else None,
        overlaps_staging=has_process,
        plan_fingerprint="plan",
        on_event=lambda event, step, fields: None,
        timeout_s=WAIT_S,
        retention=KEEP,
    )

    def save(step: int) -> Pending:
        tensors, state = training.live.flatten()
        return _OurPending(
            saver.save(step, tensors, state, reason="benchmark", changing=training.live.changing)
        )

    def close() -> None:
        assert saver.close(WAIT_S)
        dist.barrier(group)  # rank 0 serves the store

    return Method(
        name=f"ours, {mode}",
        save=save,
        before_optimizer_step=saver.finish_staging,
        path=lambda step: folder / f"ours-step-{step:08d}",
        close=close,
        num_kept=KEEP.keep_latest_k,
    )


class _OurPending:
    def __init__(self, handle: SaveHandle) -> None:
        self._handle = handle

    def wait(self, timeout_s: float) -> bool:
        is_done = self._handle.wait(timeout_s)
        assert self._handle.outcome is None or self._handle.outcome.ok, self._handle.outcome
        return is_done

    def persist_s(self) -> float:
        assert self._handle.outcome is not None
        return self._handle.outcome.persist_s


def _shared_store(rank: int, group: dist.ProcessGroup) -> dist.Store:
    server = None
    if rank == 0:
        server = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    port = [server.port if server else 0]
    dist.broadcast_object_list(port, group=group, group_src=0)
    return dist.PrefixStore("ours", server or dist.TCPStore(LOOPBACK, port[0], is_master=False))


class _FuturePending:
    def __init__(self, future: Future[Any]) -> None:
        self._future = future
        self._began_s = time.perf_counter()
        self._done_s = self._began_s
        future.add_done_callback(self._set_done)

    def _set_done(self, future: Future[Any]) -> None:
        self._done_s = time.perf_counter()

    def wait(self, timeout_s: float) -> bool:
        if timeout_s > 0 or self._future.done():
            self._future.result(timeout_s)
        return self._future.done()

    def persist_s(self) -> float:
        return self._done_s - self._began_s


def dcp_sync(training: Training, folder: Path) -> Method:
    """torch.distributed.checkpoint.save: training stands still until all is written."""

    def save(step: int) -> Pending:
        done: Future[None] = Future()
        dcp.save(training.tensors(), checkpoint_id=folder / str(step), process_group=training.group)
        done.set_result(None)
        return _FuturePending(done)

    return Method(name="DCP save", save=save, path=lambda step: folder / str(step))


def dcp_thread(training: Training, folder: Path) -> Method:
    """torch.distributed.checkpoint.async_save in a thread, on a process group of its own."""
    group = dist.new_group(backend="gloo")
    return _dcp_async(training, folder, AsyncCheckpointerType.THREAD, group)


def dcp_process(training: Training, folder: Path) -> Method:
    """The same in its background process, with default staging."""
    return _dcp_async(training, folder, AsyncCheckpointerType.PROCESS, None)


def _dcp_async(
    training: Training,
    folder: Path,
    kind: AsyncCheckpointerType,
    group: dist.ProcessGroup | None,
) -> Method:
    def save(step: int) -> Pending:
        future = dcp.async_save(
            training.tensors(),
            checkpoint_id=folder / str(step),
            async_checkpointer_type=kind,
            process_group=group,
        )
        assert isinstance(future, Future)
        return _FuturePending(future)

    def close() -> None:
        _async_process_executor._CHECKPOINT_PROCESS = None  # its finalizer ends the process

    return Method(
        name=f"DCP async_save {kind.name}",
        save=save,
        path=lambda step: folder / str(step),
        close=close,
    )


class _Module(pl.LightningModule):
    """The same training as Lightning has it."""

    def __init__(self, batch: torch.Tensor) -> None:
        super().__init__()
        self.batch = batch

    @override
    def configure_model(self) -> None:
        self.stack = sharded_stack(self.device_mesh["data_parallel"])

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.stack.parameters(), lr=1e-4, foreach=True)

    @override
    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        loss: torch.Tensor = self.stack(self.batch).square().mean()
        return loss

    @override
    def train_dataloader(self) -> range:
        return range(10**6)


class _TimedCheckpoint(ModelCheckpoint):
    """ModelCheckpoint after every second step, timed; the steps between have none."""

    def __init__(self, folder: Path) -> None:
        super().__init__(dirpath=folder, every_n_train_steps=2, save_top_k=-1)
        self.stalls_s: list[float] = []

    @override
    def on_train_batch_end(self, trainer: Any, *args: Any, **fields: Any) -> None:
        began_s = time.perf_counter()
        super().on_train_batch_end(trainer, *args, **fields)
        if trainer.global_step % 2 == 0:
            self.stalls_s.append(time.perf_counter() - began_s)


def lightning_stalls_s(training: Training, folder: Path, num_saves: int) -> list[float]:
    """Lightning's ModelCheckpoint under ModelParallelStrategy; it has no asynchronous mode here."""
    size = training.group.size()
    os.environ |= {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": "1",  # the process group is there already
        "RANK": str(training.rank),
        "LOCAL_RANK": str(training.rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "benchmark",
    }
    checkpoint = _TimedCheckpoint(folder)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=ModelParallelStrategy(
            data_parallel_size=size, tensor_parallel_size=1, save_distributed_checkpoint=True
        ),
        plugins=[TorchElasticEnvironment()],
        callbacks=[checkpoint],
        max_steps=2 * num_saves,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(_Module(training.batch))
    return checkpoint.stalls_s


def restore_ours(training: Training, path: Path) -> None:
    """Into the tensors of the same state; every byte is verified."""
    load_checkpoint(path, training.tensors(), process_group=training.group)


def restore_dcp(training: Training, path: Path) -> None:
    """Into the tensors of the same state; nothing is verified."""
    dcp.load(training.tensors(), checkpoint_id=path, process_group=training.group)
