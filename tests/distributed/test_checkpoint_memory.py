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

from hetero_fw.checkpoint import WriterProcess, checkpoint_path
from hetero_fw.recovery import die_with_parent
from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoint import close_together, make_saver
from tests.unit.checkpoint.examples import PREFIX, WAIT_S

NUM_SAVES = 100
# Caches and pools have filled by then.
NUM_WARMUP_SAVES = 20
NUM_ELEMENTS = 6_250_000  # of 4 bytes, on each rank
TOLERANCE = 0.02


def memory_bytes(writer: WriterProcess | None) -> int:
    """Memory of this rank and its writer, shared pages divided among their users."""
    gc.collect()
    pids = [psutil.Process().pid]
    if writer is not None:
        assert writer.pid is not None
        pids.append(writer.pid)
    return sum(int(psutil.Process(pid).memory_full_info().pss) for pid in pids)


def save_often(rank: int, group: dist.ProcessGroup, root: str, has_process: bool) -> list[int]:
    """Memory after every few saves, with nothing in flight."""
    executor = WriterProcess(die_with_parent) if has_process else None
    saver = make_saver(Path(root), rank, group, executor=executor, overlaps_staging=has_process)
    tensors = {
        f"model.{rank}": torch.ones(NUM_ELEMENTS // 2),
        f"optim.{rank}.exp_avg": torch.ones(NUM_ELEMENTS // 2),
        "model.all": torch.ones(100),
    }
    used: list[int] = []
    for step in range(1, NUM_SAVES + 1):
        state = {"step": step, "history": ["x" * 20] * 50}
        handle = saver.save(step, tensors, state, reason="test")
        saver.finish_staging()
        assert handle.wait(WAIT_S)
        assert handle.outcome is not None
        assert handle.outcome.ok, handle.outcome.reason
        assert len(saver.poll()) == 1
        dist.barrier(group)
        if rank == 0:
            shutil.rmtree(checkpoint_path(Path(root), PREFIX, step))
        if step % NUM_WARMUP_SAVES == 0:
            used.append(memory_bytes(executor))
            dist.barrier(group)  # who leaves earlier makes the shared pages of the others dearer
    close_together(saver, group)
    return used


@pytest.mark.slow
@pytest.mark.parametrize("has_process", [False, True], ids=["thread", "process"])
def test_host_memory_is_flat(tmp_path: Path, has_process: bool) -> None:
    ranks: list[Any] = run_ranks(save_often, 2, str(tmp_path), has_process, timeout_s=100.0)
    used = [sum(parts) for parts in zip(*ranks, strict=True)]
    assert used[-1] <= used[0] * (1 + TOLERANCE), [f"{value / 1e6:.1f} MB" for value in used]
