"""What has to be true of the files before a checkpoint exists: on the disk, and complete."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero_fw.checkpoint import (
    FileEntry,
    HashAlgorithm,
    Manifest,
    NodePlace,
    SavePoint,
    claim_attempt,
    read_manifest,
)
from hetero_fw.checkpoint.hashing import hexdigest
from hetero_fw.checkpoint.replicas import send_copy
from hetero_fw.errors import CheckpointError
from tests.unit.checkpoint.examples import PREFIX, make_saver, published, save, spec_of, weights
from tests.unit.checkpoint.node_directories import shard
from tests.unit.checkpoint.test_replicas import receiver

NAME = f"{PREFIX}-step-00000001"
STAGED = f".staging-1/{NAME}"
SHARD, COPY = shard(0), shard(1)


class Watch:
    """Notes in order what is synced, with the size that it has then, and what is renamed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.notes: list[str] = []
        self.sizes: dict[str, int] = {}
        self._root = root
        real_sync, real_rename = os.fsync, os.rename

        def sync(descriptor: int) -> None:
            real_sync(descriptor)
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            self.sizes[path.name] = os.fstat(descriptor).st_size
            self.notes.append(f"sync {self._name(path)}")

        def rename(source: Path, target: Path) -> None:
            real_rename(source, target)
            self.notes.append(f"rename {self._name(source)} to {self._name(target)}")

        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(os, "rename", rename)

    def _name(self, path: Path) -> str:
        """Below the root, without the tokens of saves."""
        parts = path.relative_to(self._root).parts
        return "/".join(p.partition(".")[0] if p.startswith(PREFIX) else p for p in parts) or "root"


def test_every_byte_and_every_name_is_on_the_disk_before_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = make_saver(tmp_path)
    watch = Watch(monkeypatch, tmp_path)
    outcome = save(saver, 1, weights(1))
    assert watch.notes == [
        f"sync {STAGED}/{SHARD}",
        f"sync {STAGED}",
        f"sync {STAGED}/manifest.json",
        f"sync {STAGED}",
        f"rename {STAGED} to {NAME}",
        "sync root",
    ]
    assert outcome.path == tmp_path / NAME
    for name in (SHARD, "manifest.json"):
        assert watch.sizes[name] == (outcome.path / name).stat().st_size > 0


def test_one_that_is_replaced_goes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = make_saver(tmp_path)
    assert save(saver, 1, weights(1)).ok
    watch = Watch(monkeypatch, tmp_path)
    assert save(saver, 1, weights(2)).ok
    assert watch.notes[-4:] == [
        f"sync {STAGED}",
        f"rename {NAME} to .retired-1/{NAME}",
        f"rename {STAGED} to {NAME}",
        "sync root",
    ]


def test_a_copy_is_on_the_disk_before_its_sender_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytes(range(256)) * 100
    watch = Watch(monkeypatch, tmp_path)
    with receiver(tmp_path) as address:
        send_copy(
            address,
            memoryview(content),
            folder=NAME,
            file=COPY,
            algorithm=HashAlgorithm.XXH3_128,
            digest=hexdigest(HashAlgorithm.XXH3_128, content),
        )
        assert watch.notes == [f"sync {NAME}/{COPY}", f"sync {NAME}"]
    assert watch.sizes[COPY] == len(content)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _extend(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_cut, r"shard-00000.bin has 18159 bytes, its rank wrote 18160"),
        (_extend, r"shard-00000.bin has 18161 bytes, its rank wrote 18160"),
        (Path.unlink, r"No such file or directory: .*shard-00000.bin"),
    ],
    ids=["cut", "extended", "gone"],
)
def test_a_file_that_is_not_what_its_rank_wrote_is_not_published(
    tmp_path: Path, damage: Callable[[Path], None], told: str
) -> None:
    """As rank 0 may find the file of another on a network file system."""
    hurt: list[Path] = []

    def hurt_once(point: SavePoint) -> None:
        if point is SavePoint.SHARD_SYNCED and not hurt:
            hurt.extend(tmp_path.glob(f".staging-1/*/{SHARD}"))
            damage(hurt[0])

    saver = make_saver(tmp_path, on_point=hurt_once)
    outcome = save(saver, 1, weights(1))
    assert not outcome.ok
    assert len(hurt) == 1
    assert re.search(told, outcome.reason), outcome.reason
    assert published(tmp_path) == []
    assert save(saver, 1, weights(1)).ok


class Node:
    """The directory of a node that holds a shard of its own and a copy of another node's."""

    def __init__(self, root: Path) -> None:
        directories = claim_attempt(root, 1)
        self.place = NodePlace(directories=directories, node="a", files=(SHARD, COPY))
        self.spec = spec_of(1, token="a", world_size=3)
        self.manifest = Manifest(
            step=1,
            attempt=1,
            plan_fingerprint="plan",
            world_size=3,
            created_time_s=1.0,
            reason="test",
            is_finite=True,
            files=tuple(
                FileEntry(name=shard(number), size=10 + number, digest="0" * 32)
                for number in range(3)
            ),
            tensors={},
            state={},
        )

    def publish(self, sizes: dict[str, int]) -> None:
        folder = self.place.unpublished(self.spec)
        folder.mkdir()
        for name, size in sizes.items():
            (folder / name).write_bytes(bytes(size))
        self.place.publish(self.spec, self.manifest)


def test_a_node_publishes_its_own_part_and_its_copies_alone(tmp_path: Path) -> None:
    Node(tmp_path).publish({SHARD: 10, COPY: 11})
    assert published(tmp_path / NAME) == ["manifest.json", SHARD, COPY]
    assert len(read_manifest(tmp_path / NAME).files) == 3


@pytest.mark.parametrize("name", [SHARD, COPY])
def test_a_node_does_not_publish_a_part_of_another_size(tmp_path: Path, name: str) -> None:
    sizes = {SHARD: 10, COPY: 11, name: 9}
    with pytest.raises(CheckpointError, match=rf"{name} has 9 bytes, its rank wrote 1[01]"):
        Node(tmp_path).publish(sizes)
    assert published(tmp_path) == []


def test_a_node_does_not_publish_without_a_copy(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=COPY):
        Node(tmp_path).publish({SHARD: 10})
    assert published(tmp_path) == []
