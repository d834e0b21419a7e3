"""Restoring with several ranks: each byte once, from whichever tier and replica has it intact."""

from __future__ import annotations

import errno
import shutil
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from hetero_fw.checkpoint import (
    PATIENCE_S,
    DamagedCheckpointError,
    Filled,
    FoundCheckpoint,
    HashAlgorithm,
    Quarantine,
    Ranks,
    Rejection,
    TierRoot,
    checkpoint_path,
    fill_from,
    find_candidates,
    load_checkpoint,
    load_newest,
    read_manifest,
    read_quarantine,
)
from hetero_fw.checkpoint.manifest import MANIFEST_NAME
from hetero_fw.errors import CheckpointError
from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoint import close_together, finished, make_saver
from tests.storage_faults import Fault, faulty_storage
from tests.unit.checkpoint.examples import PREFIX

STEPS = (10, 20)


def full_tensors(step: int) -> dict[str, torch.Tensor]:
    """Large enough for several spans a rank; odd sizes, no dims, no elements, several dtypes."""
    generator = torch.Generator().manual_seed(step)
    return {
        "rows": torch.randn(1031, 257, generator=generator),
        "columns": torch.randn(64, 8192, generator=generator).to(torch.bfloat16),
        "cube": torch.randint(-9, 9, (7, 33, 1001), generator=generator),
        "long": torch.randn(700_001, generator=generator, dtype=torch.float64),
        "flags": torch.randn(4099, generator=generator) > 0,
        "scalar": torch.tensor(float(step)),
        "empty": torch.zeros(0, 3),
    }


NUM_BYTES = sum(tensor.nbytes for tensor in full_tensors(10).values())

PLACEMENTS: Mapping[str, Placement] = {
    "rows": Shard(0),
    "columns": Shard(1),
    "cube": Shard(2),
    "long": Shard(0),
    "flags": Shard(0),
}


def laid_out(
    full: Mapping[str, torch.Tensor], group: dist.ProcessGroup, *, replicated: bool
) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (group.size(),))
    if replicated:
        return {name: tensor.clone() for name, tensor in full.items()}
    return {
        name: distribute_tensor(tensor, mesh, [PLACEMENTS.get(name, Replicate())])
        for name, tensor in full.items()
    }


def save_steps(
    rank: int,
    group: dist.ProcessGroup,
    root: str,
    replicated: bool,
    algorithm: HashAlgorithm = HashAlgorithm.XXH3_128,
) -> None:
    saver = make_saver(Path(root), rank, group, hash=algorithm)
    for step in STEPS:
        tensors = laid_out(full_tensors(step), group, replicated=replicated)
        saver.save(step, tensors, {"step": step}, reason="test")
        assert [outcome.ok for outcome in finished(saver)] == [True]
    close_together(saver, group)


def is_exact(tensors: Mapping[str, torch.Tensor], step: int) -> bool:
    return all(
        torch.equal(
            tensor.full_tensor() if isinstance(tensor, DTensor) else tensor,
            full_tensors(step)[name],
        )
        for name, tensor in tensors.items()
    )


def find(
    roots: list[TierRoot],
    group: dist.ProcessGroup,
    rejected: list[Rejection],
    *,
    patience_s: float = PATIENCE_S,
) -> Iterator[FoundCheckpoint]:
    # As in a run, rank 0 alone needs to know.
    is_first = dist.get_rank(group) == 0
    quarantine = read_quarantine(roots[-1].path) if is_first else Quarantine()
    return find_candidates(
        Ranks(group),
        roots,
        PREFIX,
        refuse=lambda manifest: quarantine.reason(manifest.step, manifest.attempt),
        on_rejected=rejected.append,
        patience_s=patience_s,
    )


def load(
    candidates: Iterator[FoundCheckpoint], group: dist.ProcessGroup, *, replicated: bool
) -> tuple[FoundCheckpoint, Filled] | None:
    """The newest that fills tensors, after their values were compared."""
    tensors: dict[str, torch.Tensor] = {}

    def fill(found: FoundCheckpoint) -> Filled:
        zeros = {name: torch.zeros_like(t) for name, t in full_tensors(found.step).items()}
        tensors.update(laid_out(zeros, group, replicated=replicated))
        return fill_from(found, tensors)

    loaded = load_newest(candidates, fill)
    if loaded is not None:
        assert is_exact(tensors, loaded[0].step)
    return loaded


def restore(
    rank: int,
    group: dist.ProcessGroup,
    roots_of: Callable[[int], list[TierRoot]],
    replicated: bool,
) -> dict[str, Any]:
    """What a rank found, after its values were compared."""
    rejected: list[Rejection] = []
    loaded = load(find(roots_of(rank), group, rejected), group, replicated=replicated)
    if loaded is None:
        return {"rejected": rejected, "step": None}
    found, filled = loaded
    return {"rejected": rejected, "step": found.step, **asdict(filled)}


class StorageOnly:
    """The roots of every rank: `root`, common to all."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, rank: int) -> list[TierRoot]:
        return [TierRoot(tier="storage", path=self.root)]


class TwoNodes(StorageOnly):
    """Ranks 0 and 1 on one node, 2 and 3 on the other, each with a directory of its own."""

    def __call__(self, rank: int) -> list[TierRoot]:
        node = f"node{rank // 2}"
        return [
            TierRoot(tier="local", path=self.root / node, node=node),
            TierRoot(tier="storage", path=self.root / "storage"),
        ]


@pytest.mark.parametrize(
    ("num_saved", "num_restored"), [(4, 4), (4, 2), (4, 3), (2, 4), (1, 4), (3, 1)]
)
def test_every_byte_is_read_once_by_one_rank(
    tmp_path: Path, num_saved: int, num_restored: int
) -> None:
    run_ranks(save_steps, num_saved, str(tmp_path), False)
    results = run_ranks(restore, num_restored, StorageOnly(tmp_path), False)
    for found in results:
        assert found["step"] == STEPS[-1]
        assert found["bytes_read"] == found["size_bytes"] == NUM_BYTES
        assert not found["rejected"]
    # Nobody waits for one that reads everything.
    own = [found["own_bytes"] for found in results]
    assert sum(own) == NUM_BYTES
    if num_saved >= num_restored:
        assert max(own) < 0.9 * NUM_BYTES or num_restored == 1


@pytest.mark.parametrize(("num_saved", "num_restored"), [(2, 2), (3, 2), (1, 3)])
def test_replicated_state_is_read_once_too(
    tmp_path: Path, num_saved: int, num_restored: int
) -> None:
    run_ranks(save_steps, num_saved, str(tmp_path), True)
    for found in run_ranks(restore, num_restored, StorageOnly(tmp_path), True):
        assert found["bytes_read"] == NUM_BYTES


@pytest.fixture(scope="module", params=[HashAlgorithm.XXH3_128])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    run_ranks(save_steps, 4, str(root), False, request.param)
    return root


@pytest.fixture
def nodes(saved: Path, tmp_path: Path) -> Path:
    """Step 20 on two nodes, which both have some shards of the other's; step 10 on storage."""
    shutil.copytree(saved, tmp_path / "saved")
    for node, shards in (("node0", (0, 1, 2, 3)), ("node1", (2, 3, 0))):
        copy = checkpoint_path(tmp_path / node, PREFIX, 20)
        copy.mkdir(parents=True)
        for name in (MANIFEST_NAME, *(f"shard-{shard:05d}.bin" for shard in shards)):
            shutil.copy(checkpoint_path(tmp_path / "saved", PREFIX, 20) / name, copy)
    shutil.copytree(
        checkpoint_path(tmp_path / "saved", PREFIX, 10),
        checkpoint_path(tmp_path / "storage", PREFIX, 10),
    )
    return tmp_path


def shard(root: Path, node: str, number: int, step: int = 20) -> Path:
    return checkpoint_path(root / node, PREFIX, step) / f"shard-{number:05d}.bin"


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_local_copies_spare_storage(nodes: Path) -> None:
    (found, *others) = run_ranks(restore, 4, TwoNodes(nodes), False)
    assert (found["step"], found["tiers"]) == (20, ("local",))
    assert found["bytes_read"] == NUM_BYTES
    assert not found["rejected"]
    assert min(other["own_bytes"] for other in others) > 0


def test_a_lost_node_leaves_its_peers_copies(nodes: Path) -> None:
    shutil.rmtree(nodes / "node1")
    for found in run_ranks(restore, 4, TwoNodes(nodes), False):
        assert (found["step"], found["tiers"]) == (20, ("local",))
        assert found["sources"] == (str(checkpoint_path(nodes / "node0", PREFIX, 20)),)
        assert not found["rejected"]


@pytest.mark.parametrize("saved", HashAlgorithm, indirect=True)
def test_a_damaged_replica_is_named_and_the_good_one_used(nodes: Path) -> None:
    damage(shard(nodes, "node1", 3))
    for found in run_ranks(restore, 4, TwoNodes(nodes), False):
        assert (found["step"], found["tiers"]) == (20, ("local",))
        (rejection,) = found["rejected"]
        assert rejection.path == str(checkpoint_path(nodes / "node1", PREFIX, 20))
        assert f"{shard(nodes, 'node1', 3)}: bytes" in rejection.reason
        assert found["bytes_read"] > NUM_BYTES


def test_a_truncated_replica_is_not_even_read(nodes: Path) -> None:
    path = shard(nodes, "node1", 3)
    path.write_bytes(path.read_bytes()[:-1])
    for found in run_ranks(restore, 4, TwoNodes(nodes), False):
        assert (found["step"], found["bytes_read"]) == (20, NUM_BYTES)
        assert str(path) in found["rejected"][0].reason


def test_storage_stands_in_for_damaged_local_copies(nodes: Path) -> None:
    shutil.copytree(
        checkpoint_path(nodes / "saved", PREFIX, 20),
        checkpoint_path(nodes / "storage", PREFIX, 20),
    )
    damage(shard(nodes, "node0", 1))
    (found, *_) = run_ranks(restore, 4, TwoNodes(nodes), False)
    assert (found["step"], found["tiers"]) == (20, ("local", "storage"))
    assert len(found["rejected"]) == 1


def test_a_damaged_manifest_is_read_elsewhere(nodes: Path) -> None:
    manifest = checkpoint_path(nodes / "node0", PREFIX, 20) / MANIFEST_NAME
    manifest.write_text(manifest.read_text().replace('"step": 20', '"step": 21'))
    for found in run_ranks(restore, 4, TwoNodes(nodes), False):
        assert (found["step"], found["bytes_read"]) == (20, NUM_BYTES)
        (rejection,) = found["rejected"]
        assert str(manifest) in rejection.reason


def test_no_sound_copy_of_one_file_means_the_next_older_step(nodes: Path) -> None:
    for node in ("node0", "node1"):
        damage(shard(nodes, node, 2))
    for found in run_ranks(restore, 4, TwoNodes(nodes), False):
        assert (found["step"], found["tiers"]) == (10, ("storage",))
        assert [rejection.step for rejection in found["rejected"]] == [20, 20]
        reasons = sorted(rejection.reason for rejection in found["rejected"])
        for node, reason in zip(("node0", "node1"), reasons, strict=True):
            assert str(shard(nodes, node, 2)) in reason


def test_a_file_that_nobody_has_is_named(nodes: Path) -> None:
    shard(nodes, "node0", 1).unlink()
    (found, *_) = run_ranks(restore, 4, TwoNodes(nodes), False)
    assert found["step"] == 10
    (rejection,) = found["rejected"]
    assert "no copy is left of shard-00001.bin" in rejection.reason


def test_copies_of_another_save_of_the_step_are_not_mixed_in(nodes: Path) -> None:
    other = checkpoint_path(nodes / "node1", PREFIX, 20)
    shutil.rmtree(other)
    run_ranks(save_steps, 4, str(nodes / "again"), False)
    shutil.copytree(checkpoint_path(nodes / "again", PREFIX, 20), other)
    manifest = read_manifest(other)
    assert manifest.attempt == read_manifest(shard(nodes, "node0", 0).parent).attempt
    for found in run_ranks(restore, 4, TwoNodes(nodes), False):
        assert found["step"] == 20
        assert len(found["sources"]) == 1


def restore_or_say_why(
    rank: int, group: dist.ProcessGroup, root: str, patience_s: float
) -> tuple[int | str, list[Rejection]]:
    rejected: list[Rejection] = []
    try:
        candidates = find(StorageOnly(Path(root))(rank), group, rejected, patience_s=patience_s)
        loaded = load(candidates, group, replicated=False)
    except CheckpointError as error:
        return str(error), rejected
    return loaded[0].step if loaded is not None else -1, rejected


STALE = [
    Fault(operations=("readdir", "open"), names="run", error=errno.ESTALE),
    Fault(operations=("open", "read"), names="manifest.json", error=errno.ESTALE),
    Fault(operations=("read",), names="shard-*", error=errno.ETIMEDOUT),
]


@pytest.mark.parametrize("fault", STALE, ids=lambda fault: fault.names)
def test_storage_that_does_not_answer_is_waited_for_and_then_told(
    saved: Path, tmp_path: Path, fault: Fault
) -> None:
    with faulty_storage(tmp_path) as storage:
        root = storage.root / "run"
        shutil.copytree(saved, root)
        storage.inject(fault)
        for reason, rejected in run_ranks(restore_or_say_why, 2, str(root), 1.0):
            assert "the storage does not answer properly" in str(reason)
            assert str(root) in str(reason)
            assert rejected == []
        threading.Timer(2.0, storage.heal).start()
        for step, rejected in run_ranks(restore_or_say_why, 2, str(root), 20.0):
            assert (step, rejected) == (20, [])


def test_storage_that_is_broken_in_one_place_leads_to_the_step_before(
    saved: Path, tmp_path: Path
) -> None:
    with faulty_storage(tmp_path) as storage:
        root = tmp_path / "run"
        shutil.copytree(saved, root)
        newest = checkpoint_path(root, PREFIX, 20) / "shard-00001.bin"
        bad = storage.root / "bad.bin"
        shutil.move(newest, bad)
        newest.symlink_to(bad)
        storage.inject(Fault(operations=("read",), names="bad.bin", error=errno.EIO))
        for step, rejected in run_ranks(restore_or_say_why, 2, str(root), 1.0):
            assert step == 10
            assert [rejection.step for rejection in rejected] == [20]
            assert f"{newest}: cannot be read (Input/output error)" in rejected[0].reason


def load_damaged(rank: int, group: dist.ProcessGroup, path: str) -> str:
    tensors = laid_out(full_tensors(10), group, replicated=False)
    with pytest.raises(DamagedCheckpointError) as caught:
        load_checkpoint(Path(path), tensors, process_group=group)
    assert caught.value.bytes_read > 0
    return str(caught.value)


def test_all_ranks_hear_of_bytes_that_one_of_them_found_damaged(
    saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "run")
    damage(shard(tmp_path, "run", 1))
    path = checkpoint_path(tmp_path / "run", PREFIX, 20)
    messages = run_ranks(load_damaged, 2, str(path))
    assert len(set(messages)) == 1
    assert f"{shard(tmp_path, 'run', 1)}: bytes" in messages[0]


NUM_LARGE_BYTES = 192 * 2**20


def large(group: dist.ProcessGroup, value: float) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (group.size(),))
    return {
        f"{n}": distribute_tensor(torch.full((2**20,), value + n), mesh, [Shard(0)])
        for n in range(NUM_LARGE_BYTES // 2**22)
    }


def save_large(rank: int, group: dist.ProcessGroup, root: str) -> None:
    saver = make_saver(Path(root), rank, group)
    saver.save(10, large(group, 1.0), {}, reason="test")
    assert [outcome.ok for outcome in finished(saver)] == [True]
    close_together(saver, group)


def peak_of_load(rank: int, group: dist.ProcessGroup, root: str) -> int:
    """Bytes that numpy and Python took at most; tensors of torch are not among them."""
    tensors = large(group, 0.0)
    tracemalloc.start()
    load_checkpoint(checkpoint_path(Path(root), PREFIX, 10), tensors, process_group=group)
    # Never stopped: threads of gloo still free what is traced, and would crash.
    peak = tracemalloc.get_traced_memory()[1]
    for n, tensor in enumerate(tensors.values()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert bool((local == 1.0 + n).all())
    return peak


@pytest.mark.parametrize(("num_restored", "limit"), [(2, 24 * 2**20), (3, 120 * 2**20)])
def test_no_second_copy_of_the_state_is_made(tmp_path: Path, num_restored: int, limit: int) -> None:
    run_ranks(save_large, 2, str(tmp_path))
    assert max(run_ranks(peak_of_load, num_restored, str(tmp_path))) < limit


def fail_to_fill(rank: int, group: dist.ProcessGroup, root: str) -> str:
    found = next(find(StorageOnly(Path(root))(rank), group, []))
    tensors = laid_out(full_tensors(10), group, replicated=True)
    if rank == 1:
        tensors["rows"] = torch.zeros(3)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError) as caught:
        fill_from(found, tensors)
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
    return str(caught.value)


def test_what_does_not_fit_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    run_ranks(save_steps, 2, str(tmp_path), False)
    messages = run_ranks(fail_to_fill, 2, str(tmp_path))
    assert len(set(messages)) == 1
    assert "rows is [1031, 257], expected [3]" in messages[0]
    assert str(checkpoint_path(tmp_path, PREFIX, 20)) in messages[0]
