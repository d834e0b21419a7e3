"""The loop that the framework is timed against must do the same work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hetero_fw.data import ByteTextDataset, RankPart, build_train_loader
from recipes.gpt import GPTModule
from tests.benchmarks.bare_loop import GPTShape, run_bare_loop


def test_bare_loop_trains_alike(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(Path(__file__).read_bytes())
    shape = GPTShape(sequence_length=16, num_layers=1, num_heads=2, model_dim=32)
    bare = run_bare_loop(4, 8, shape=shape, seed=7, lr=1e-2, weight_decay=0.0, paths=str(text))

    dataset = ByteTextDataset(paths=str(text), sequence_length=16)
    part = RankPart(shares=(8,), rank=0, microbatches=(8,))
    torch.manual_seed(7)
    module = GPTModule(vocab_size=256, sequence_length=16, num_layers=1, num_heads=2, model_dim=32)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.0, betas=(0.9, 0.95))
    losses = []
    for [microbatch] in build_train_loader(dataset, seed=7, part=part, max_steps=4):
        optimizer.zero_grad()
        loss = module.training_step(microbatch.batch, 0)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert bare.losses == pytest.approx(losses, rel=1e-6)
    assert len(bare.step_times_s) == 4
