"""Checkpoints of several ranks: resharding, agreement, and failures of one rank."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hetero_fw.checkpoint import (
    AttemptDirectories,
    CheckpointSaver,
    DirectoryPlace,
    LiveState,
    SaveOutcome,
    checkpoint_path,
    flatten_training_state,
    list_checkpoints,
    load_checkpoint,
    read_manifest,
    restore_training_state,
    verify_checkpoint,
    weights_digest,
)
from hetero_fw.checkpoint.shard_file import write_shard
from hetero_fw.errors import CheckpointError
from hetero_fw.recovery.store import LOOPBACK
from tests.distributed.ranks import run_ranks
from tests.unit.checkpoint.examples import (
    PREFIX,
    WAIT_S,
    Model,
    claimed,
    content_digest,
    make_optimizer,
    published,
    train,
    trained,
)

# Where a rank's part of a save can be made to fail or to hang.
WRITE = "hetero_fw.checkpoint.place.write_shard"


def shared_store(rank: int, group: dist.ProcessGroup) -> dist.Store:
    """A store that rank 0 serves; `group` carries its port."""
    server = None
    if rank == 0:
        server = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    port = [server.port if server else 0]
    dist.broadcast_object_list(port, group=group, group_src=0)
    store = server or dist.TCPStore(LOOPBACK, port[0], is_master=False)
    return dist.PrefixStore("attempt1", store)


def make_saver(
    root: Path,
    rank: int,
    group: dist.ProcessGroup,
    timeout_s: float = WAIT_S,
    **options: Any,
) -> CheckpointSaver:
    own = claimed(root) if rank == 0 else AttemptDirectories(root=root, attempt=1)
    return CheckpointSaver(
        place=DirectoryPlace(directories=own),
        attempt=own.attempt,
        prefix=PREFIX,
        rank=rank,
        world_size=group.size(),
        store=shared_store(rank, group),
        process_group=group,
        is_async=True,
        plan_fingerprint="plan",
        on_event=lambda event, step, fields: None,
        timeout_s=timeout_s,
        **options,
    )


def close_together(saver: CheckpointSaver, group: dist.ProcessGroup) -> None:
    """Rank 0 serves the store, so it leaves last."""
    saver.close(WAIT_S)
    dist.barrier(group)


def sharded(kind: str, group: dist.ProcessGroup) -> tuple[Model, Optimizer]:
    """A fresh sharded model: other weights than the saved ones, no optimizer state."""
    torch.manual_seed(77)
    module = Model()
    mesh = init_device_mesh("cpu", (group.size(),))
    fully_shard(module.first, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module, make_optimizer(kind, module)


def finished(saver: CheckpointSaver) -> list[SaveOutcome]:
    assert saver.wait(WAIT_S)
    return saver.poll()


def restore_and_save(rank: int, group: dist.ProcessGroup, source: str, target: str) -> list[str]:
    """Restore every kind of optimizer state and save it again from this number of ranks."""
    digests = []
    for kind in ("adamw", "sgd"):
        module, optimizer = sharded(kind, group)
        path = checkpoint_path(Path(source) / kind, PREFIX, 3)
        state = restore_training_state(module, optimizer, path, process_group=group)
        assert state["loop"] == 3
        assert isinstance(module.first.weight, DTensor)
        digests += [content_digest(module, optimizer), weights_digest(module)]
        tensors, own = flatten_training_state(module, optimizer)
        saver = make_saver(Path(target) / kind, rank, group)
        saver.save(
            3,
            tensors,
            {"loop": 3, **own},
            reason="test",
            may_be_infinite=LiveState(module, None).buffers,
        )
        outcomes = finished(saver)
        assert [outcome.ok for outcome in outcomes] == [True], outcomes
        close_together(saver, group)
    return digests


def test_any_number_of_ranks_restores_what_any_other_saved(tmp_path: Path) -> None:
    expected = []
    for kind in ("adamw", "sgd"):
        module, optimizer = trained(kind=kind)
        expected += [content_digest(module, optimizer), weights_digest(module)]
        tensors, own = flatten_training_state(module, optimizer)
        saver = CheckpointSaver(
            place=DirectoryPlace(directories=claimed(tmp_path / "start" / kind)),
            attempt=1,
            prefix=PREFIX,
            rank=0,
            world_size=1,
            store=None,
            process_group=None,
            is_async=False,
            plan_fingerprint="plan",
            on_event=lambda event, step, fields: None,
        )
        saver.save(
            3,
            tensors,
            {"loop": 3, **own},
            reason="test",
            may_be_infinite=LiveState(module, None).buffers,
        )
    source = tmp_path / "start"
    for hop, world_size in enumerate((4, 3, 2, 1)):
        target = tmp_path / str(hop)
        found = run_ranks(restore_and_save, world_size, str(source), str(target))
        assert found == [expected] * world_size
        path = checkpoint_path(target / "adamw", PREFIX, 3)
        verify_checkpoint(path)
        assert read_manifest(path).world_size == world_size
        assert len(read_manifest(path).files) == world_size
        source = target
    plain = Model()
    optimizer = make_optimizer("adamw", plain)
    restore_training_state(plain, optimizer, checkpoint_path(source / "adamw", PREFIX, 3))
    assert content_digest(plain, optimizer) == expected[0]


def train_and_save(rank: int, group: dist.ProcessGroup, root: str) -> str:
    module, optimizer = sharded("adamw", group)
    saver = make_saver(Path(root), rank, group)
    for step in (1, 2):
        train(module, optimizer, step - 1, step)
        tensors, own = flatten_training_state(module, optimizer)
        saver.save(
            step, tensors, own, reason="test", may_be_infinite=LiveState(module, None).buffers
        )
        train(module, optimizer, step, step + 1)  # the live weights move on at once
        outcomes = finished(saver)
        assert [outcome.ok for outcome in outcomes] == [True], outcomes
    before = content_digest(module, optimizer)
    restored, restored_optimizer = sharded("adamw", group)
    path = checkpoint_path(Path(root), PREFIX, 2)
    restore_training_state(restored, restored_optimizer, path, process_group=group)
    train(restored, restored_optimizer, 2, 3)
    assert content_digest(restored, restored_optimizer) == before
    close_together(saver, group)
    return before


def test_a_resumed_sharded_run_is_bit_identical(tmp_path: Path) -> None:
    digests = run_ranks(train_and_save, 3, str(tmp_path))
    assert len(set(digests)) == 1


def save_replicated(
    rank: int, group: dist.ProcessGroup, root: str, buffers: list[str]
) -> tuple[float, int]:
    tensors = {f"model.{i}": torch.full((100,), float(i + 10 * rank)) for i in range(6)}
    saver = make_saver(Path(root), rank, group)
    saver.save(1, tensors, {"rank": rank}, reason="test", may_be_infinite=buffers)
    outcome = finished(saver)[0]
    close_together(saver, group)
    return outcome.stall_s, outcome.size_bytes


def test_replicated_tensors_are_written_once_and_spread(tmp_path: Path) -> None:
    outcomes = run_ranks(save_replicated, 2, str(tmp_path), [])
    assert outcomes[0] == outcomes[1]  # every rank learns of the same costs
    manifest = read_manifest(checkpoint_path(tmp_path, PREFIX, 1))
    assert all(len(tensor.chunks) == 1 for tensor in manifest.tensors.values())
    assert min(file.size for file in manifest.files) >= 1000
    assert manifest.state == {"rank": 0}


def test_what_ranks_have_for_themselves_is_that_of_one_rank(tmp_path: Path) -> None:
    """Of averages, say: from several ranks they would not fit together."""
    buffers = [f"model.{i}" for i in range(5)]
    run_ranks(save_replicated, 2, str(tmp_path), buffers)
    path = checkpoint_path(tmp_path, PREFIX, 1)
    assert all(len(tensor.chunks) == 1 for tensor in read_manifest(path).tensors.values())
    found = {f"model.{i}": torch.empty(100) for i in range(6)}
    load_checkpoint(path, found)
    assert all((found[name] == i).all() for i, name in enumerate(buffers))


def tensors_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {f"model.{rank}": torch.full((50,), float(step)), "model.all": torch.tensor(step)}


def summary(outcomes: list[SaveOutcome]) -> list[tuple[int, bool, str]]:
    return [(outcome.step, outcome.ok, outcome.reason) for outcome in outcomes]


def fail_on_rank_2(rank: int, group: dist.ProcessGroup, root: str) -> Any:
    saver = make_saver(Path(root), rank, group)
    saver.save(1, tensors_of(rank, 1), {}, reason="first")
    found = summary(finished(saver))
    patch = pytest.MonkeyPatch()
    if rank == 2:

        def full_disk(*args: object) -> object:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(WRITE, full_disk)
    started_s = time.monotonic()
    saver.save(2, tensors_of(rank, 2), {}, reason="second")
    found += summary(finished(saver))
    wait_s = time.monotonic() - started_s
    patch.undo()
    saver.save(3, tensors_of(rank, 3), {}, reason="third")
    found += summary(finished(saver))
    close_together(saver, group)
    return found, wait_s


def test_a_write_error_of_one_rank_is_every_ranks_verdict(tmp_path: Path) -> None:
    results = run_ranks(fail_on_rank_2, 3, str(tmp_path))
    for found, wait_s in results:
        assert [(step, ok) for step, ok, _ in found] == [(1, True), (2, False), (3, True)]
        assert "rank 2: the storage is full by its own account, though " in found[1][2]
        assert "are free and 200 B are needed (a quota, " in found[1][2]
        assert found[1][2].endswith(": [Errno 28] No space left on device")
        assert wait_s < 10.0
    assert [info.step for info in list_checkpoints(tmp_path, PREFIX)] == [3, 1]
    assert len(published(tmp_path)) == 2


def hang_on_rank_1(rank: int, group: dist.ProcessGroup, root: str) -> Any:
    saver = make_saver(Path(root), rank, group, timeout_s=1.0)
    gate = threading.Event()
    patch = pytest.MonkeyPatch()
    if rank == 1:

        def held(*args: object) -> object:
            assert gate.wait(WAIT_S)
            return write_shard(*args)  # type: ignore[arg-type]

        patch.setattr(WRITE, held)
    started_s = time.monotonic()
    first = saver.save(1, tensors_of(rank, 1), {}, reason="first")
    second = saver.save(2, tensors_of(rank, 2), {}, reason="second")  # rank 1 is still busy
    assert second.wait(WAIT_S)
    assert rank == 1 or first.wait(WAIT_S)
    wait_s = time.monotonic() - started_s
    dist.barrier(group)
    gate.set()
    found = summary(finished(saver))
    dist.barrier(group)
    saver.save(3, tensors_of(rank, 3), {}, reason="third")
    found += summary(finished(saver))
    close_together(saver, group)
    return found, wait_s


def test_a_rank_that_hangs_in_its_write_holds_nobody_for_long(tmp_path: Path) -> None:
    for found, wait_s in run_ranks(hang_on_rank_1, 3, str(tmp_path)):
        assert [(step, ok) for step, ok, _ in found] == [(1, False), (2, False), (3, True)]
        assert "rank 1" in found[0][2] or "ranks [1]" in found[0][2]
        assert "rank 1: the storage still holds an earlier write" in found[1][2]
        assert wait_s < 8.0
    assert published(tmp_path) == ["hetero_ckpt-step-00000003"]


def plan_misfit(rank: int, group: dist.ProcessGroup, root: str) -> Any:
    saver = make_saver(Path(root), rank, group)
    odd: dict[str, Any] = {"model.x": "text" if rank == 1 else torch.ones(2)}
    saver.save(1, odd, {}, reason="first")
    saver.save(2, tensors_of(rank, 2), {}, reason="second")
    found = summary(finished(saver))
    close_together(saver, group)
    return found


def test_a_rank_that_cannot_plan_fails_the_save_on_all(tmp_path: Path) -> None:
    for found in run_ranks(plan_misfit, 2, str(tmp_path)):
        assert [(step, ok) for step, ok, _ in found] == [(1, False), (2, True)]
        assert "rank 1: not tensors: model.x" in found[0][2]


def load_with_one_bad_rank(rank: int, group: dist.ProcessGroup, root: str) -> str:
    saver = make_saver(Path(root), rank, group)
    saver.save(1, tensors_of(rank, 1), {}, reason="test")
    finished(saver)
    close_together(saver, group)
    size = 51 if rank == 1 else 50
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(
            checkpoint_path(Path(root), PREFIX, 1),
            {f"model.{rank}": torch.zeros(size)},
            process_group=group,
        )
    return str(caught.value)


def test_a_load_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    messages = run_ranks(load_with_one_bad_rank, 2, str(tmp_path))
    assert messages[0] == messages[1]
    assert "model.1 is [50], expected [51]" in messages[0]
