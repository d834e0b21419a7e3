"""The plain PyTorch loop that the framework's overhead is measured against.

The same GPT, initial weights, samples, optimizer and clipping as `python train.py`, and the loss as
a number after each step, with nothing around them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from hetero_fw.data import StepIndexedSampler, check_paths
from hetero_fw.data.text import STDLIB_MAX_BYTES, read_bytes, split_windows
from recipes.gpt import GPT

MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class GPTShape:
    """Arguments of `GPT`; the defaults are those of conf/model/gpt.yaml."""

    vocab_size: int = 256
    sequence_length: int = 64
    num_layers: int = 4
    num_heads: int = 4
    model_dim: int = 256


@dataclass(frozen=True, kw_only=True)
class BareRun:
    step_times_s: list[float]
    losses: list[float]


def run_bare_loop(
    steps: int,
    batch: int,
    *,
    shape: GPTShape | None = None,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    seed: int = 1234,
    paths: str | Sequence[str] | None = None,
    val_fraction: float = 0.1,
    device: str = "cpu",
) -> BareRun:
    """Train for `steps` optimizer steps of `batch` samples; a step time includes its data."""
    shape = shape or GPTShape()
    text = read_bytes(check_paths(paths), STDLIB_MAX_BYTES if paths is None else None)
    length = shape.sequence_length
    windows, _ = split_windows((len(text) - 1) // length, val_fraction)
    sampler = StepIndexedSampler(num_samples=len(windows), global_batch_size=batch, seed=seed)
    indices = [sampler.step_indices(step) for step in range(1, steps + 1)]
    offsets = np.arange(length + 1)

    torch.manual_seed(seed)
    model = GPT(
        vocab_size=shape.vocab_size,
        sequence_length=length,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        model_dim=shape.model_dim,
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay, betas=betas)
    step_times_s, losses = [], []
    for step_indices in indices:
        begin_s = time.perf_counter()
        rows = text[windows[step_indices][:, None] * length + offsets].astype(np.int64)
        tokens = torch.from_numpy(rows).to(device)
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        losses.append(loss.item())
        step_times_s.append(time.perf_counter() - begin_s)
    return BareRun(step_times_s=step_times_s, losses=losses)


def main() -> None:
    """Run the loop in a process of its own and print the `BareRun` as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=int)
    parser.add_argument("batch", type=int)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(json.dumps(asdict(run_bare_loop(arguments.steps, arguments.batch))))


if __name__ == "__main__":
    main()
