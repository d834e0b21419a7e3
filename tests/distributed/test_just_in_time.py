"""A rank raises; its peers, in the middle of the next step, save the last one without it moving."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hetero_fw.checkpoint import (
    CheckpointSaver,
    JustInTimeSave,
    LiveState,
    SaveContent,
    SaveOutcome,
    SavePoint,
    StandingStep,
    WriterProcess,
    checkpoint_path,
    restore_training_state,
    verify_checkpoint,
)
from hetero_fw.checkpoint.executor import ThreadExecutor
from hetero_fw.checkpoint.save_point import pass_by
from hetero_fw.policies import Tier
from hetero_fw.recovery import die_with_parent
from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoint import (
    close_together,
    finished,
    make_saver,
    sharded,
    shared_store,
)
from tests.unit.checkpoint.examples import (
    PREFIX,
    WAIT_S,
    Model,
    content_digest,
    make_optimizer,
    published,
)

RAISES = 1
LAST = 3


def standing(step: int, live: LiveState) -> StandingStep:
    buffers = live.copy_buffers()

    def content(reason: str) -> SaveContent:
        tensors, values = live.flatten()
        return SaveContent(
            step=step,
            tensors=tensors | buffers,
            state={"loop": step, **values},
            reason=reason,
            may_be_infinite=live.buffers,
        )

    return StandingStep(step=step, content=content)


def train_step(module: nn.Module, optimizer: Optimizer, part: JustInTimeSave, step: int) -> None:
    """One step as training takes it; in it the ranks wait for each other."""
    torch.manual_seed(step)
    optimizer.zero_grad()
    module(torch.randn(6, 5)).square().mean().backward()
    part.move()
    optimizer.step()


def part_of(
    saver: CheckpointSaver, rank: int, group: dist.ProcessGroup, *, starts: bool = True
) -> JustInTimeSave:
    part = JustInTimeSave(saver, shared_store(rank, group), rank=rank, world_size=group.size())
    if starts:
        part.start()
    return part


def dawdle(point: SavePoint) -> None:
    if point is SavePoint.SHARD_WRITTEN:
        time.sleep(0.5)


def raise_in_a_step(
    rank: int, group: dist.ProcessGroup, root: str, in_process: bool, is_slow: bool
) -> tuple[str, str, Any]:
    """The rank that raises comes late to step 4; what it asks for happens before that."""
    executor = WriterProcess(die_with_parent) if in_process else ThreadExecutor()
    saver = make_saver(
        Path(root),
        rank,
        group,
        executor=executor,
        overlaps_staging=True,
        on_point=dawdle if is_slow else pass_by,
    )
    part = part_of(saver, rank, group)
    module, optimizer = sharded("adamw", group)
    for step in range(LAST):
        train_step(module, optimizer, part, step)
        if step == 0:
            live = LiveState(module, optimizer)
            saver.prepare(live.flatten()[0])
        part.stand(standing(step + 1, live))
        if is_slow and step == 1:
            tensors, state = live.flatten()
            saver.save(2, tensors, state, reason="on time", may_be_infinite=live.buffers)
            saver.finish_staging()
    expected = content_digest(module, optimizer)
    outcome = part.ask("raised", [Tier.STORAGE], WAIT_S) if rank == RAISES else None
    train_step(module, optimizer, part, LAST)
    later = content_digest(module, optimizer)
    part.stop()
    close_together(saver, group)
    return expected, later, outcome


@pytest.mark.parametrize(("in_process", "is_slow"), [(False, False), (True, False), (False, True)])
def test_the_finished_step_is_saved_whole_while_the_peers_compute(
    tmp_path: Path, in_process: bool, is_slow: bool
) -> None:
    results = run_ranks(raise_in_a_step, 3, str(tmp_path), in_process, is_slow)
    expected, later, _ = results[0]
    outcome = results[RAISES][2]
    assert isinstance(outcome, SaveOutcome)
    assert outcome.ok, outcome.reason
    path = checkpoint_path(tmp_path, PREFIX, LAST)
    assert verify_checkpoint(path) is None
    module = Model()
    optimizer = make_optimizer("adamw", module)
    state = restore_training_state(module, optimizer, path)
    assert state["loop"] == LAST
    assert content_digest(module, optimizer) == expected != later
    steps = [2, LAST] if is_slow else [LAST]
    assert published(tmp_path) == [checkpoint_path(tmp_path, PREFIX, n).name for n in steps]


def one_cannot(rank: int, group: dist.ProcessGroup, root: str, why: str) -> tuple[Any, float, bool]:
    """Rank 2 does not take part; afterwards saves go on as ever."""
    saver = make_saver(Path(root), rank, group)
    module, optimizer = sharded("sgd", group)
    part = part_of(saver, rank, group, starts=not (rank == 2 and why == "silent"))
    train_step(module, optimizer, part, 0)
    live = LiveState(module, optimizer)
    saver.prepare(live.flatten()[0])
    part.stand(standing(1, live))
    if rank == 2 and why == "moving":
        part.move()
    if rank == 2 and why == "ahead":
        part.stand(standing(2, live))
    if rank == 2 and why == "other tensors":
        content = standing(1, live).content("")
        odd = {**content.tensors, "model.more": torch.zeros(1)}
        changed = SaveContent(step=1, tensors=odd, state={}, reason="")
        part.stand(StandingStep(step=1, content=lambda reason: changed))
    dist.barrier(group)
    began_s = time.monotonic()
    outcome = part.ask("raised", [Tier.STORAGE], WAIT_S) if rank == RAISES else None
    taken_s = time.monotonic() - began_s
    dist.barrier(group)
    part.stop()
    saver.save(1, *live.flatten(), reason="later", may_be_infinite=live.buffers)
    (ended,) = finished(saver)
    close_together(saver, group)
    return outcome, taken_s, ended.ok


@pytest.mark.parametrize(
    ("why", "reason", "limit_s"),
    [
        ("moving", "rank 2: the weights were changing", 2.0),
        ("ahead", "rank 2: stands at step 2, not at 1", 2.0),
        ("other tensors", "rank 2: the tensors are not those that saves were planned for", 2.0),
        ("silent", "rank 2: no answer within 3 s", 6.0),
    ],
)
def test_unless_all_stand_at_the_step_nobody_saves(
    tmp_path: Path, why: str, reason: str, limit_s: float
) -> None:
    results = run_ranks(one_cannot, 3, str(tmp_path), why)
    outcome, taken_s, _ = results[RAISES]
    assert outcome == reason
    assert taken_s < limit_s
    assert all(later_ok for _, _, later_ok in results)
    assert published(tmp_path) == [checkpoint_path(tmp_path, PREFIX, 1).name]


def two_raise(rank: int, group: dist.ProcessGroup, root: str) -> Any:
    """All ranks but the first ask at once, as after a time-out of a collective."""
    saver = make_saver(Path(root), rank, group)
    module, optimizer = sharded("sgd", group)
    part = part_of(saver, rank, group)
    train_step(module, optimizer, part, 0)
    live = LiveState(module, optimizer)
    saver.prepare(live.flatten()[0])
    part.stand(standing(1, live))
    dist.barrier(group)
    outcome = part.ask(f"rank {rank} raised", [Tier.STORAGE], WAIT_S) if rank else None
    close_together(saver, group)
    return outcome, part.has_led


def test_ranks_that_raise_together_save_once(tmp_path: Path) -> None:
    results = run_ranks(two_raise, 3, str(tmp_path))
    assert all(outcome.ok for outcome, _ in results[1:])
    assert sum(has_led for _, has_led in results) == 1
    assert published(tmp_path) == [checkpoint_path(tmp_path, PREFIX, 1).name]
