"""Saves to storage that is full, read-only, broken, torn or hung: training goes on, and heals."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero_fw.checkpoint import (
    CheckpointSaver,
    SaveHandle,
    WriterProcess,
    checkpoint_path,
    list_checkpoints,
    load_checkpoint,
    verify_checkpoint,
)
from hetero_fw.recovery import die_with_parent
from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoint import close_together, make_saver
from tests.storage_faults import FULL, READ_ONLY, Fault, FaultyStorage, faulty_storage
from tests.unit.checkpoint.examples import PREFIX, WAIT_S, published

NUM_ELEMENTS = 400_000
# A process that hung is replaced by another one, which takes seconds to start on a busy machine.
TIMEOUT_S = {"thread": 3.0, "process": 4.0}
STEP_BOUND_S = 1.0

BROKEN_WRITE = Fault(operations=("write",), error=errno.EIO)
BROKEN_SYNC = Fault(operations=("fsync",), error=errno.EIO)
ERRORS = {
    "full": (FULL, "No space left on device"),
    "over quota": (replace(FULL, error=errno.EDQUOT), "quota"),
    "read-only": (READ_ONLY, "Read-only file system"),
    "write error": (BROKEN_WRITE, "Input/output error"),
    "write error of one rank": (replace(BROKEN_WRITE, names="*00001*"), "rank 1.*Input/output"),
    "sync error": (BROKEN_SYNC, "Input/output error"),
    "sync error of a directory": (replace(BROKEN_SYNC, operations=("fsyncdir",)), "Input/output"),
    "torn shard": (replace(BROKEN_WRITE, after_bytes=1_000_000), "Input/output error"),
    "torn manifest": (replace(BROKEN_WRITE, names="manifest*", after_bytes=100), "Input/output"),
    "error in publishing": (Fault(operations=("rename",), error=errno.ESTALE), "[Ss]tale"),
}
HANGS = {
    "write": Fault(operations=("write",), hangs=True),
    "sync": Fault(operations=("fsync",), hangs=True),
    "write of one rank": Fault(operations=("write",), names="*00001*", hangs=True),
    "manifest": Fault(operations=("write",), names="manifest*", hangs=True),
    "everything": Fault(operations=("getattr", "readdir", "open", "create", "mkdir"), hangs=True),
}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank saw of a save.

    Attributes:
        ok: None if there was no verdict within the bound.
        call_s: how long `save` took; `verdict_s` how long the verdict took from then on.
        longest_step_s: of the training steps meanwhile.
    """

    ok: bool | None
    reason: str
    call_s: float
    verdict_s: float
    longest_step_s: float


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[FaultyStorage]:
    with faulty_storage(tmp_path) as mounted:
        yield mounted


def tensors_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {f"model.{rank}": torch.full((NUM_ELEMENTS,), float(step)), "model.all": torch.ones(1)}


def train_until(saver: CheckpointSaver, handle: SaveHandle, deadline_s: float) -> float:
    """Train until the verdict or the deadline; the longest step in seconds."""
    weights, longest_s = torch.ones(100, 100), 0.0
    while not handle.is_done and time.monotonic() < deadline_s:
        began_s = time.monotonic()
        weights = (weights @ weights) / 100
        saver.poll()
        time.sleep(0.01)
        longest_s = max(longest_s, time.monotonic() - began_s)
    return longest_s


def save_and_train(saver: CheckpointSaver, rank: int, step: int, bound_s: float) -> Seen:
    began_s = time.monotonic()
    handle = saver.save(step, tensors_of(rank, step), {"step": step}, reason="test")
    called_s = time.monotonic()
    longest_s = train_until(saver, handle, called_s + bound_s)
    outcome = handle.outcome
    return Seen(
        ok=outcome.ok if outcome else None,
        reason=outcome.reason if outcome else "no verdict",
        call_s=called_s - began_s,
        verdict_s=time.monotonic() - called_s,
        longest_step_s=longest_s,
    )


def save_through(
    rank: int, group: dist.ProcessGroup, storage: FaultyStorage, fault: Fault, executor: str
) -> list[Seen]:
    """Step 1 on healthy storage, 2 and 3 with the fault, 4 after it."""
    saver = make_saver(
        storage.root / "checkpoints",
        rank,
        group,
        timeout_s=TIMEOUT_S[executor],
        executor=WriterProcess(die_with_parent) if executor == "process" else None,
    )
    seen = [save_and_train(saver, rank, 1, WAIT_S)]
    dist.barrier(group)
    if rank == 0:
        storage.inject(fault)
    dist.barrier(group)
    seen += [save_and_train(saver, rank, step, bound_s(executor)) for step in (2, 3)]
    dist.barrier(group)
    if rank == 0:
        storage.heal()
    dist.barrier(group)
    seen.append(save_and_train(saver, rank, 4, WAIT_S))
    close_together(saver, group)
    return seen


def bound_s(executor: str) -> float:
    """The verdict comes a quarter later than the timeout at most; clearing up, which a hung storage
    holds up as well, has its own bound."""
    return 1.25 * TIMEOUT_S[executor] + 12.0


def check_training_went_on(seen: list[Seen], executor: str) -> None:
    assert [save.ok for save in seen] == [True, False, False, True], seen
    for save in seen:
        assert save.longest_step_s < STEP_BOUND_S, seen
        assert save.call_s < bound_s(executor), seen
        assert save.verdict_s < bound_s(executor), seen


def check_what_is_left(root: Path) -> None:
    """Checkpoints 1 and 4, whole; nothing else looks like one."""
    assert published(root) == [f"{PREFIX}-step-{step:08d}" for step in (1, 4)]
    assert [info.step for info in list_checkpoints(root, PREFIX)] == [4, 1]
    for step in (1, 4):
        path = checkpoint_path(root, PREFIX, step)
        verify_checkpoint(path)
        loaded = {f"model.{rank}": torch.zeros(NUM_ELEMENTS) for rank in range(2)}
        load_checkpoint(path, loaded)
        assert all(bool((tensor == step).all()) for tensor in loaded.values())


@pytest.mark.parametrize("executor", TIMEOUT_S)
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_fails_the_save_and_nothing_else(
    storage: FaultyStorage, name: str, executor: str
) -> None:
    fault, words = ERRORS[name]
    ranks: list[Any] = run_ranks(save_through, 2, storage, fault, executor)
    for seen in ranks:
        check_training_went_on(seen, executor)
        for save in seen[1:3]:
            assert re.search(words, save.reason), save.reason
    check_what_is_left(storage.root / "checkpoints")


@pytest.mark.parametrize("executor", TIMEOUT_S)
@pytest.mark.parametrize("name", HANGS)
def test_storage_that_hangs_holds_nobody(storage: FaultyStorage, name: str, executor: str) -> None:
    ranks: list[Any] = run_ranks(save_through, 2, storage, HANGS[name], executor)
    for seen in ranks:
        check_training_went_on(seen, executor)
        assert "no verdict" not in (seen[1].reason, seen[2].reason)
    check_what_is_left(storage.root / "checkpoints")
