"""What one writes without the framework: FSDP2, a checkpoint every few steps, resume, torchrun.

torchrun --standalone --nproc-per-node=4 --max-restarts=10 stock_loop.py FOLDER --launch 0

FOLDER gets `steps.csv` (launch, restart, step, time in seconds) and a file with each rank's pid.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler

from hetero_fw.data import ByteTextDataset
from recipes.gpt import GPT


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, restart = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    (arguments.folder / f"{arguments.launch}-{restart}-{rank}.pid").write_text(str(os.getpid()))
    torch.manual_seed(1234)
    model = GPT(
        vocab_size=256,
        sequence_length=arguments.sequence_length,
        num_layers=arguments.num_layers,
        num_heads=4,
        model_dim=arguments.model_dim,
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    first_step = _load_newest(arguments.folder, model, optimizer) + 1
    batches = _batches(arguments.sequence_length, arguments.batch_size, epoch=first_step)
    with (arguments.folder / "steps.csv").open("a", buffering=1) as log:
        for step in range(first_step, arguments.steps + 1):
            _train_step(model, optimizer, next(batches))
            if rank == 0:
                log.write(f"{arguments.launch},{restart},{step},{time.time()}\n")
            if step % arguments.save_interval == 0:
                dcp.save(_state(model, optimizer), checkpoint_id=arguments.folder / f"step-{step}")
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--launch", type=int, required=True)
    for name in ("steps", "save-interval", "batch-size", "sequence-length"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("num-layers", "model-dim"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_args()


def _batches(sequence_length: int, batch_size: int, *, epoch: int) -> Iterator[dict[str, Tensor]]:
    dataset = ByteTextDataset(sequence_length=sequence_length)
    sampler: DistributedSampler[dict[str, Tensor]] = DistributedSampler(dataset, seed=1234)
    sampler.set_epoch(epoch)
    return iter(DataLoader(dataset, batch_size // dist.get_world_size(), sampler=sampler))


def _train_step(model: nn.Module, optimizer: AdamW, batch: dict[str, Tensor]) -> float:
    optimizer.zero_grad()
    logits = model(batch["input_ids"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _state(model: nn.Module, optimizer: AdamW) -> dict[str, Any]:
    weights, optimizer_state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": optimizer_state}


def _load_newest(folder: Path, model: nn.Module, optimizer: AdamW) -> int:
    """Load the newest complete checkpoint and return its step, 0 without one."""
    # DCP writes its metadata last.
    steps = [int(path.parent.name.split("-")[1]) for path in folder.glob("step-*/.metadata")]
    if not steps:
        return 0
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder / f"step-{max(steps)}")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return max(steps)


if __name__ == "__main__":
    main()
