"""Checkpoints in directories of emulated nodes: every part on two of them, or none at all."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typing_extensions import override

from hetero_fw.checkpoint import (
    AttemptDirectories,
    CheckpointSaver,
    DirectoryPlace,
    HashAlgorithm,
    NodePlace,
    NodeRoles,
    NodeTier,
    SaveOutcome,
    SavePoint,
    WriterProcess,
    claim_attempt,
    read_manifest,
    verify_checkpoint,
)
from hetero_fw.checkpoint.executor import ThreadExecutor
from hetero_fw.checkpoint.save_tasks import WritePart
from hetero_fw.policies import ReplicaNode, RetentionRule, Tier, plan_replicas
from hetero_fw.recovery import die_with_parent
from hetero_fw.recovery.store import LOOPBACK
from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoint import PREFIX, WAIT_S, shared_store
from tests.unit.checkpoint.examples import published

LOCAL, STORAGE = Tier.LOCAL, Tier.STORAGE
BOTH = (LOCAL, STORAGE)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which node each rank is on, and where the copies of a node's parts go."""

    nodes: tuple[str, ...]

    def peers(self) -> dict[str, tuple[str, ...]]:
        facts = [
            ReplicaNode(
                name=node,
                group=node,
                num_bytes=self.nodes.count(node),
                free_bytes=1000,
                link_bytes_per_s=1.0,
            )
            for node in dict.fromkeys(self.nodes)
        ]
        return dict(plan_replicas(facts, 2, num_kept=3).peers)

    def receivers(self, rank: int) -> tuple[int, ...]:
        return tuple(self.nodes.index(peer) for peer in self.peers()[self.nodes[rank]])

    def files(self, node: str) -> tuple[str, ...]:
        sources = {node, *(name for name, peers in self.peers().items() if node in peers)}
        return tuple(f"shard-{rank:05d}.bin" for rank, of in enumerate(self.nodes) if of in sources)


def make_saver(
    root: Path, rank: int, group: dist.ProcessGroup, layout: Layout, **options: Any
) -> CheckpointSaver:
    node = layout.nodes[rank]
    leaders = tuple(layout.nodes.index(name) for name in dict.fromkeys(layout.nodes))
    own = AttemptDirectories(root=root / "nodes" / node, attempt=1)
    shared = AttemptDirectories(root=root / "storage", attempt=1)
    if rank in leaders:
        claim_attempt(own.root, 1)
    if rank == 0:
        claim_attempt(shared.root, 1)
    dist.barrier(group)
    return CheckpointSaver(
        place=DirectoryPlace(directories=shared),
        attempt=1,
        prefix=PREFIX,
        rank=rank,
        world_size=group.size(),
        store=shared_store(rank, group),
        process_group=group,
        is_async=True,
        plan_fingerprint="plan",
        on_event=lambda event, step, fields: None,
        node_tier=NodeTier(
            place=NodePlace(directories=own, node=node, files=layout.files(node)),
            roles=NodeRoles(leaders=leaders, receivers=layout.receivers(rank), host=LOOPBACK),
        ),
        retention=RetentionRule(keep_latest_k=2),
        **{"timeout_s": WAIT_S, **options},
    )


def tensors_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {f"model.{rank}": torch.full((5000,), float(step)), "model.all": torch.tensor(step)}


def finished(saver: CheckpointSaver) -> dict[Tier, SaveOutcome]:
    assert saver.wait(WAIT_S)
    return {outcome.tier: outcome for outcome in saver.poll()}


def save_some(
    rank: int, group: dist.ProcessGroup, root: str, nodes: Sequence[str], algorithm: HashAlgorithm
) -> Any:
    options: dict[str, Any] = {
        "hash": algorithm,
        "executor": WriterProcess(die_with_parent),
        "node_executor": WriterProcess(die_with_parent),
    }
    saver = make_saver(Path(root), rank, group, Layout(nodes=tuple(nodes)), **options)
    found = []
    for step, tiers in ((1, BOTH), (2, (LOCAL,)), (3, (LOCAL,)), (4, BOTH)):
        saver.save(step, tensors_of(rank, step), {}, reason="test", tiers=tiers)
        found.append({tier: (o.ok, o.reason) for tier, o in finished(saver).items()})
    dist.barrier(group)
    saver.close(WAIT_S)
    return found


@pytest.mark.parametrize(
    ("nodes", "algorithm"),
    [
        (("a", "a", "b", "b"), HashAlgorithm.XXH3_128),
        (("a", "b", "c"), HashAlgorithm.SHA256),
        (("a", "b"), HashAlgorithm.BLAKE2B),
    ],
)
def test_every_part_lies_on_two_nodes(
    tmp_path: Path, nodes: tuple[str, ...], algorithm: HashAlgorithm
) -> None:
    ok = (True, "test")
    for found in run_ranks(save_some, len(nodes), str(tmp_path), nodes, algorithm):
        assert found == [
            {LOCAL: ok, STORAGE: ok},
            {LOCAL: ok},
            {LOCAL: ok},
            {LOCAL: ok, STORAGE: ok},
        ]
    layout = Layout(nodes=nodes)
    holders = [name for node in set(nodes) for name in layout.files(node)]
    assert all(holders.count(f"shard-{rank:05d}.bin") == 2 for rank in range(len(nodes)))
    for node in set(nodes):
        root = tmp_path / "nodes" / node
        assert published(root) == ["hetero_ckpt-step-00000003", "hetero_ckpt-step-00000004"]
        for name in published(root):
            assert published(root / name) == ["manifest.json", *layout.files(node)]
        assert list((root / ".staging-1").iterdir()) == []
    storage = tmp_path / "storage"
    assert published(storage) == ["hetero_ckpt-step-00000001", "hetero_ckpt-step-00000004"]
    for name in published(storage):
        verify_checkpoint(storage / name)
    # Whole, from the directories of the nodes that are left when one is lost.
    for lost in set(nodes):
        merged = tmp_path / f"without-{lost}"
        for node in set(nodes) - {lost}:
            shutil.copytree(
                tmp_path / "nodes" / node / "hetero_ckpt-step-00000004", merged, dirs_exist_ok=True
            )
        verify_checkpoint(merged)
        assert (read_manifest(merged).step, read_manifest(merged).hash) == (4, algorithm)


class FullDisk:
    """The storage is full at one point, while this is armed."""

    def __init__(self, point: SavePoint) -> None:
        self._point, self.is_armed = point, False

    def __call__(self, point: SavePoint) -> None:
        if point is self._point and self.is_armed:
            raise OSError(28, "No space left on device")


def fail_at(rank: int, group: dist.ProcessGroup, root: str, victim: int, point: str) -> Any:
    """In-process executors, so that the failure can be armed for one save."""
    on_point = FullDisk(SavePoint(point))
    nodes = ("a", "a", "b", "b")
    saver = make_saver(
        Path(root), rank, group, Layout(nodes=nodes), on_point=on_point, timeout_s=3.0
    )
    found = []
    for step in (1, 2, 3):
        on_point.is_armed = step == 2 and rank == victim
        saver.save(step, tensors_of(rank, step), {}, reason="test", tiers=(LOCAL,))
        outcome = finished(saver)[LOCAL]
        found.append((outcome.ok, outcome.reason))
        dist.barrier(group)
    saver.close(WAIT_S)
    return found


@pytest.mark.parametrize(
    ("victim", "point"),
    [
        (0, SavePoint.SHARD_SYNCED),
        (3, SavePoint.SHARD_PIECE),
        (0, SavePoint.PUBLISHING),
        (2, SavePoint.WRITING_MANIFEST),
        (2, SavePoint.PUBLISHING),
    ],
)
def test_what_fails_on_one_node_exists_on_none(tmp_path: Path, victim: int, point: str) -> None:
    for found in run_ranks(fail_at, 4, str(tmp_path), victim, point):
        assert [ok for ok, _ in found] == [True, False, True]
        assert "No space left on device" in found[1][1]
    for node in ("a", "b"):
        root = tmp_path / "nodes" / node
        assert published(root) == ["hetero_ckpt-step-00000001", "hetero_ckpt-step-00000003"]
        assert list((root / ".staging-1").iterdir()) == []


class Rotting(ThreadExecutor):
    """A node's file of step 2 is damaged by `damage` before it is taken to the storage."""

    def __init__(self, damage: Callable[[Path], None]) -> None:
        super().__init__()
        self._damage = damage

    @override
    def run(self, task: Any, **options: Any) -> Any:
        if isinstance(task, WritePart) and task.source is not None and task.spec.step == 2:
            self._damage(task.source)
        return super().run(task, **options)


def flip_bytes(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def upload_damaged(
    rank: int, group: dist.ProcessGroup, root: str, damage: Callable[[Path], None]
) -> Any:
    executor = Rotting(damage) if rank == 1 else ThreadExecutor()
    saver = make_saver(Path(root), rank, group, Layout(nodes=("a", "b")), executor=executor)
    found = []
    for step in (1, 2, 3):
        saver.save(step, tensors_of(rank, step), {}, reason="test", tiers=BOTH)
        found.append({tier: (o.ok, o.reason) for tier, o in finished(saver).items()})
        dist.barrier(group)
    saver.close(WAIT_S)
    return found


@pytest.mark.parametrize("damage", [flip_bytes, cut_short, empty])
def test_a_nodes_file_that_is_damaged_is_not_uploaded(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    for first, second, third in run_ranks(upload_damaged, 2, str(tmp_path), damage):
        ok = (True, "test")
        assert first == third == {LOCAL: ok, STORAGE: ok}
        assert second[LOCAL] == ok
        assert not second[STORAGE][0]
        assert "step-00000002/shard-00001.bin: is damaged" in second[STORAGE][1]
    storage = tmp_path / "storage"
    assert published(storage) == ["hetero_ckpt-step-00000001", "hetero_ckpt-step-00000003"]
    for name in published(storage):
        verify_checkpoint(storage / name)
    assert list((storage / ".staging-1").iterdir()) == []


def kill_receiver(rank: int, group: dist.ProcessGroup, root: str) -> Any:
    process = WriterProcess(die_with_parent)
    saver = make_saver(Path(root), rank, group, Layout(nodes=("a", "b")), node_executor=process)
    found = []
    for step in (1, 2):
        big = {f"model.{rank}": torch.full((30_000_000,), float(step))}
        saver.save(step, big, {}, reason="test", tiers=(LOCAL,))
        if step == 1 and rank == 1:
            target = Path(root) / "nodes/b/.staging-1"
            deadline_s = time.monotonic() + WAIT_S
            # Once the first bytes of the copy are there.
            while not list(target.glob("*/shard-00000.bin")) and time.monotonic() < deadline_s:
                threading.Event().wait(0.001)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        outcome = finished(saver)[LOCAL]
        found.append((outcome.ok, outcome.reason))
        dist.barrier(group)
    saver.close(WAIT_S)
    return found


def test_a_writer_killed_while_it_takes_a_copy_costs_one_save(tmp_path: Path) -> None:
    for found in run_ranks(kill_receiver, 2, str(tmp_path)):
        assert [ok for ok, _ in found] == [False, True], found
        assert "killed by SIGKILL" in found[0][1] or "no copy on node b" in found[0][1]
    for node in ("a", "b"):
        assert published(tmp_path / "nodes" / node) == ["hetero_ckpt-step-00000002"]
