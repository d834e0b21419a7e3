"""A hundred saves leave host memory where it was."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from hetero_fw.checkpoint import checkpoint_path
from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoint import close_together, make_saver
from tests.unit.checkpoint.examples import PREFIX, WAIT_S

NUM_SAVES = 100
# Caches and pools have filled by then.
NUM_WARMUP_SAVES = 20
NUM_ELEMENTS = 6_250_000  # of 4 bytes, on each rank
TOLERANCE = 0.02


def memory_bytes() -> int:
    """Memory of this process and of those it has started, shared pages divided among their users.

    What ends meanwhile has none.
    """
    gc.collect()
    here = psutil.Process()
    total = 0
    for process in (here, *here.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return int(total)


def save_often(rank: int, group: dist.ProcessGroup, root: str) -> list[int]:
    """Memory after every few saves, with nothing in flight."""
    saver = make_saver(Path(root), rank, group)
    tensors = {
        f"model.{rank}": torch.ones(NUM_ELEMENTS // 2),
        f"optim.{rank}.exp_avg": torch.ones(NUM_ELEMENTS // 2),
        "model.all": torch.ones(100),
    }
    used: list[int] = []
    for step in range(1, NUM_SAVES + 1):
        state = {"step": step, "history": ["x" * 20] * 50}
        handle = saver.save(step, tensors, state, reason="test")
        assert handle.wait(WAIT_S)
        assert handle.outcome is not None
        assert handle.outcome.ok, handle.outcome.reason
        assert len(saver.poll()) == 1
        dist.barrier(group)
        if rank == 0:
            shutil.rmtree(checkpoint_path(Path(root), PREFIX, step))
        if step % NUM_WARMUP_SAVES == 0:
            used.append(memory_bytes())
    close_together(saver, group)
    return used


@pytest.mark.slow
def test_host_memory_is_flat(tmp_path: Path) -> None:
    ranks: list[Any] = run_ranks(save_often, 2, str(tmp_path), timeout_s=100.0)
    used = [sum(parts) for parts in zip(*ranks, strict=True)]
    assert used[-1] <= used[0] * (1 + TOLERANCE), [f"{value / 1e6:.1f} MB" for value in used]
