"""Whatever happens to the files of a checkpoint, nothing that was not written is ever loaded."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash

from hetero_fw.checkpoint import (
    Filled,
    FoundCheckpoint,
    Ranks,
    Rejection,
    TierRoot,
    checkpoint_path,
    fill_from,
    find_candidates,
    find_restorable,
    load_checkpoint,
    load_newest,
)
from hetero_fw.errors import CheckpointError
from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoint import close_together, finished, make_saver
from tests.unit.checkpoint.examples import PREFIX, published

NUM_CORRUPTIONS = 1000
STEPS = (10, 20)
PAGE_BYTES = 4096
SHARDS = ("shard-00000.bin", "shard-00001.bin")
MANIFEST = "manifest.json"

Corruption = Callable[[Path, random.Random], set[str]]


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    """The same on all ranks, so that they are spread over the shards; no byte is the same twice."""
    generator = torch.Generator().manual_seed(step)
    return {
        f"model.{index}": torch.randn(1000 + index, generator=generator) for index in range(8)
    } | {"model.count": torch.tensor(step)}


def save_steps(rank: int, group: dist.ProcessGroup, root: str) -> None:
    """Commit every step; the first one also under another root, with other values."""
    for name, offset in (("run", 0), ("other", 1)):
        saver = make_saver(Path(root) / name, rank, group)
        for step in STEPS:
            saver.save(step, tensors_of(step + offset), {"step": step}, reason="test")
            assert [outcome.ok for outcome in finished(saver)] == [True]
        close_together(saver, group)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    run_ranks(save_steps, 2, str(root))
    return root


@pytest.fixture
def root(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "run", tmp_path / "run"))


def newest(root: Path) -> Path:
    return checkpoint_path(root, PREFIX, STEPS[-1])


def flip_bits(path: Path, chance: random.Random) -> set[str]:
    file = path / chance.choice([*SHARDS, MANIFEST])
    content = bytearray(file.read_bytes())
    for _ in range(chance.choice([1, 1, 2, 64])):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)
    return {file.name}


def zero_pages(path: Path, chance: random.Random) -> set[str]:
    file = path / chance.choice(SHARDS)
    content = bytearray(file.read_bytes())
    start = chance.randrange(len(content)) // PAGE_BYTES * PAGE_BYTES
    end = min(len(content), start + PAGE_BYTES * chance.choice([1, 2]))
    content[start:end] = bytes(end - start)
    file.write_bytes(content)
    return {file.name}


def truncate(path: Path, chance: random.Random) -> set[str]:
    file = path / chance.choice([*SHARDS, MANIFEST])
    os.truncate(file, chance.randrange(file.stat().st_size))
    return {file.name}


def extend(path: Path, chance: random.Random) -> set[str]:
    file = path / chance.choice(SHARDS)
    with file.open("ab") as opened:
        opened.write(bytes(chance.randrange(1, 2 * PAGE_BYTES)))
    return {file.name}


def swap_shards(path: Path, chance: random.Random) -> set[str]:
    """Those of two ranks, or one with the same rank's of another step or another run."""
    name = chance.choice(SHARDS)
    source = chance.choice(["rank", "step", "run"])
    if source == "rank":
        (path / SHARDS[0]).rename(path / "shard")
        (path / SHARDS[1]).rename(path / SHARDS[0])
        (path / "shard").rename(path / SHARDS[1])
        return set(SHARDS)
    older = checkpoint_path(path.parent, PREFIX, STEPS[0])
    shutil.copy((older if source == "step" else other_run(path)) / name, path)
    return {name}


def make_metadata_stale(path: Path, chance: random.Random) -> set[str]:
    """The manifest of an older step, or of another save of the same step."""
    older = checkpoint_path(path.parent, PREFIX, STEPS[0])
    shutil.copy(chance.choice([older, other_run(path)]) / MANIFEST, path)
    return {MANIFEST, *SHARDS}


def forge_metadata(path: Path, chance: random.Random) -> set[str]:
    """Change a field of the manifest without its hash."""
    manifest = json.loads((path / MANIFEST).read_text())
    entry = manifest["tensors"][chance.choice(sorted(manifest["tensors"]))]["chunks"][0]
    change: dict[str, Any] = chance.choice(
        [{"byte_offset": entry["byte_offset"] + 64}, {"xxh3_128": "0" * 32}, {"offsets": [1]}]
    )
    entry.update(change)
    (path / MANIFEST).write_text(json.dumps(manifest))
    return {MANIFEST}


def remove_files(path: Path, chance: random.Random) -> set[str]:
    names = chance.sample([*SHARDS, MANIFEST], chance.choice([1, 1, 2]))
    for name in names:
        (path / name).unlink()
    return set(names)


def other_run(path: Path) -> Path:
    return path.parent / "other"


CORRUPTIONS: tuple[Corruption, ...] = (
    flip_bits,
    zero_pages,
    truncate,
    extend,
    swap_shards,
    make_metadata_stale,
    forge_metadata,
    remove_files,
)


def restorable(root: Path) -> tuple[int | None, list[str]]:
    """The step that a run would resume from, and why newer ones were rejected."""
    rejected: list[str] = []
    info = find_restorable(root, PREFIX, lambda path, reason: rejected.append(reason))
    return (info.step if info is not None else None), rejected


def resumed(root: Path) -> tuple[int, list[Rejection]]:
    """The step that a run resumes from, with exactly its values, and what it had to reject."""
    rejected: list[Rejection] = []
    candidates = find_candidates(
        Ranks(None),
        [TierRoot(tier="storage", path=root)],
        PREFIX,
        refuse=lambda manifest: None,
        on_rejected=rejected.append,
    )
    tensors: dict[str, torch.Tensor] = {}

    def fill(found: FoundCheckpoint) -> Filled:
        tensors.update({f: torch.zeros_like(t) for f, t in tensors_of(found.step).items()})
        return fill_from(found, tensors)

    loaded = load_newest(candidates, fill)
    assert loaded is not None
    expected = tensors_of(loaded[0].step)
    assert all(torch.equal(tensors[fqn], expected[fqn]) for fqn in expected)
    return loaded[0].step, rejected


def loads_silently(path: Path) -> bool:
    """Whether other values than those that were saved are loaded without an error."""
    tensors = {fqn: torch.zeros_like(tensor) for fqn, tensor in tensors_of(STEPS[-1]).items()}
    try:
        load_checkpoint(path, tensors)
    except CheckpointError:
        return False
    # What was damaged can lie between two tensors; these are then as they were saved.
    return not all(torch.equal(tensors[fqn], t) for fqn, t in tensors_of(STEPS[-1]).items())


def test_a_thousand_corruptions_and_no_silent_load(root: Path, originals: Path) -> None:
    chance = random.Random(7)
    original = newest(originals / "run")
    shutil.copytree(newest(originals / "other"), root / "other")
    counts: Counter[str] = Counter()
    num_between = 0
    for number in range(NUM_CORRUPTIONS):
        shutil.rmtree(newest(root))
        shutil.copytree(original, newest(root))
        corrupt = CORRUPTIONS[number % len(CORRUPTIONS)]
        damaged = corrupt(newest(root), chance)
        step, rejected = restorable(root)
        assert step == STEPS[0], f"{corrupt.__name__} number {number} was not found"
        assert len(rejected) == 1
        assert any(str(newest(root) / name) in rejected[0] for name in damaged), rejected
        assert not loads_silently(newest(root)), f"{corrupt.__name__} number {number}"
        step, found = resumed(root)
        if step == STEPS[0]:
            (rejection,) = found
            assert (rejection.step, rejection.path) == (STEPS[-1], str(newest(root)))
            assert any(str(newest(root) / name) in rejection.reason for name in damaged), found
        else:  # the damage lies between two tensors
            num_between += 1
            assert not found
        counts[corrupt.__name__] += 1
    assert sum(counts.values()) == NUM_CORRUPTIONS
    assert len(counts) == len(CORRUPTIONS)
    assert num_between < NUM_CORRUPTIONS // 20
    assert len(published(root)) == len(STEPS) + 1


class Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> object:
        return os.system, (f"touch {self._path}",)


def matched(manifest: dict[str, Any], name: str, content: bytes) -> dict[str, Any]:
    """The manifest as a forger would write it for a shard with this content."""
    (file,) = [file for file in manifest["files"] if file["name"] == name]
    file |= {"size": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    for entry in manifest["tensors"].values():
        for chunk in entry["chunks"]:
            if chunk["file"] == name:
                start = chunk["byte_offset"]
                part = content[start : start + chunk["length"]]
                chunk["xxh3_128"] = xxhash.xxh3_128_hexdigest(part)
    return manifest


def with_own_hash(manifest: dict[str, Any]) -> str:
    payload = {key: value for key, value in manifest.items() if key != "xxh3_128"}
    canonical = json.dumps(payload, sort_keys=True, separators=(",", ":"))
    return json.dumps({"xxh3_128": xxhash.xxh3_128_hexdigest(canonical.encode()), **payload})


@pytest.mark.parametrize("name", SHARDS)
def test_a_bomb_in_a_shard_is_only_numbers(root: Path, tmp_path: Path, name: str) -> None:
    path, mark = newest(root), tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(mark))
    size = (path / name).stat().st_size
    content = bomb + bytes(size - len(bomb))
    (path / name).write_bytes(content)
    manifest = matched(json.loads((path / MANIFEST).read_text()), name, content)
    (path / MANIFEST).write_text(with_own_hash(manifest))
    assert restorable(root) == (STEPS[-1], [])  # nobody can tell, so it must do no harm
    load_checkpoint(path, tensors_of(STEPS[-1]))
    assert not mark.exists()


def test_a_bomb_for_a_manifest_is_rejected(root: Path, tmp_path: Path) -> None:
    path, mark = newest(root), tmp_path / "exploded"
    for content in (
        pickle.dumps(Bomb(mark)),
        with_own_hash({"format": "pickle", "data": pickle.dumps(Bomb(mark), 0).decode()}).encode(),
    ):
        (path / MANIFEST).write_bytes(content)
        step, rejected = restorable(root)
        assert step == STEPS[0]
        assert str(path / MANIFEST) in rejected[0]
        with pytest.raises(CheckpointError, match=MANIFEST):
            load_checkpoint(path, tensors_of(STEPS[-1]))
    assert not mark.exists()


def test_a_bomb_in_the_state_stays_text(root: Path, tmp_path: Path) -> None:
    path, mark = newest(root), tmp_path / "exploded"
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["state"] = {"callbacks": pickle.dumps(Bomb(mark), 0).decode()}
    (path / MANIFEST).write_text(with_own_hash(manifest))
    for extra in (".metadata", "data.pkl", "shard-00002.bin"):
        (path / extra).write_bytes(pickle.dumps(Bomb(mark)))
    assert load_checkpoint(path, tensors_of(STEPS[-1])) == manifest["state"]
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../../outside.bin", "/etc/passwd", "..", MANIFEST])
def test_a_manifest_cannot_name_files_elsewhere(root: Path, name: str) -> None:
    path = newest(root)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"][0]["name"] = name
    (path / MANIFEST).write_text(with_own_hash(manifest))
    with pytest.raises(CheckpointError, match="is not a name of a shard file"):
        load_checkpoint(path, tensors_of(STEPS[-1]))
