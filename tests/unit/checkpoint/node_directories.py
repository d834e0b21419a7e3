"""Checkpoints in directories of nodes, written by hand: files and manifests, without ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetero_fw.checkpoint import FileEntry, HashAlgorithm, Manifest, checkpoint_path
from hetero_fw.checkpoint.hashing import hexdigest
from tests.unit.checkpoint.examples import PREFIX


def shard(number: int) -> str:
    return f"shard-{number:05d}.bin"


def write_copies(
    root: Path,
    step: int,
    holders: Mapping[str, Sequence[int]],
    *,
    attempt: int = 1,
    algorithm: HashAlgorithm = HashAlgorithm.XXH3_128,
) -> None:
    """One checkpoint: which shards each node has in its directory below `root`."""
    numbers = sorted({number for held in holders.values() for number in held})
    contents = {shard(number): bytes([number, step, attempt]) * 100 for number in numbers}
    manifest = Manifest(
        step=step,
        attempt=attempt,
        plan_fingerprint="plan",
        world_size=len(numbers),
        created_time_s=1.0,
        reason=f"after {step}",
        is_finite=True,
        files=tuple(
            FileEntry(name=name, size=len(data), digest=hexdigest(algorithm, data))
            for name, data in contents.items()
        ),
        tensors={},
        state={},
        hash=algorithm,
    )
    for node, held in holders.items():
        directory = copy_of(root, node, step)
        directory.mkdir(parents=True)
        for number in held:
            (directory / shard(number)).write_bytes(contents[shard(number)])
        (directory / "manifest.json").write_text(manifest.to_json())


def copy_of(root: Path, node: str, step: int) -> Path:
    return checkpoint_path(root / node, PREFIX, step)


def damage(path: Path) -> None:
    """Change one byte."""
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)


def note_incidents(root: Path, step: int, attempts: Sequence[int]) -> None:
    """What attempts leave behind that have diverged after they restored `step`."""
    facts = {"step": step, "saved_by": 1, "diverged_step": step + 2}
    incidents = [{**facts, "attempt": attempt} for attempt in attempts]
    root.mkdir(parents=True, exist_ok=True)
    (root / "quarantine.json").write_text(json.dumps({"incidents": incidents}))
