"""From staged bytes to a published checkpoint: what each rank and what rank 0 does."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero_fw.checkpoint.directories import publish, sync_directory
from hetero_fw.checkpoint.fencing import AttemptDirectories
from hetero_fw.checkpoint.manifest import (
    DTYPES,
    MANIFEST_NAME,
    ChunkEntry,
    FileEntry,
    Manifest,
    Metric,
    TensorEntry,
)
from hetero_fw.checkpoint.save_point import OnPoint, SavePoint, pass_by
from hetero_fw.checkpoint.shard_file import WrittenShard, write_shard, write_text
from hetero_fw.checkpoint.shard_layout import SaveLayout, ShardLayout
from hetero_fw.checkpoint.verdict import ShardReport
from hetero_fw.errors import CheckpointError

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class CommitSpec:
    """What is known of a checkpoint before a byte of it is written.

    Attributes:
        final: the directory it is published as.
        directories: where the attempt works until then.
        token: unlike any other save's of the attempt, the same on all ranks.
        metric: how good the weights are, if that is known.
        state: JSON values; rank 0 fills it.
        on_point: called at every point that the save passes.
    """

    final: Path
    directories: AttemptDirectories
    token: str
    step: int
    plan_fingerprint: str
    world_size: int
    reason: str
    metric: Metric | None = None
    on_point: OnPoint = pass_by
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def temporary(self) -> Path:
        return self.directories.staging / f"{self.final.name}.{self.token}"


def write_own_shard(spec: CommitSpec, content: memoryview, layout: ShardLayout) -> WrittenShard:
    """Every rank: write this rank's shard to the temporary directory.

    Raises:
        OSError: the storage refuses it.
    """
    spec.on_point(SavePoint.WRITING_SHARD)
    # Without its parent: that is gone when a later attempt has begun.
    spec.temporary.mkdir(exist_ok=True)
    written = write_shard(spec.temporary / layout.file_name, content, layout, spec.on_point)
    sync_directory(spec.temporary)
    spec.on_point(SavePoint.SHARD_SYNCED)
    return written


def commit(spec: CommitSpec, layout: SaveLayout, reports: Sequence[ShardReport]) -> Manifest:
    """Rank 0, when every shard is on storage: write the manifest and publish.

    Raises:
        OSError: the storage refuses it.
        CheckpointError: a shard is not as it was reported.
    """
    manifest = build_manifest(spec, layout.shards, reports)
    for file in manifest.files:
        # On a network file system rank 0 must see what the other ranks wrote.
        size = (spec.temporary / file.name).stat().st_size
        if size != file.size:
            raise CheckpointError(f"{file.name} has {size} bytes, its rank wrote {file.size}")
    spec.on_point(SavePoint.WRITING_MANIFEST)
    write_text(spec.temporary / MANIFEST_NAME, manifest.to_json())
    sync_directory(spec.temporary)
    spec.on_point(SavePoint.MANIFEST_WRITTEN)
    publish(
        spec.temporary,
        spec.final,
        retired=spec.directories.retired,
        token=spec.token,
        on_point=spec.on_point,
    )
    return manifest


def discard(spec: CommitSpec, layout: ShardLayout) -> None:
    """Every rank, when a save failed: remove its part; the last one removes the directory."""
    for name in (layout.file_name, MANIFEST_NAME):
        _unlink(spec.temporary / name)
    try:
        spec.temporary.rmdir()
    except OSError:
        return  # shards of other ranks are still there, or there was no directory


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # the next attempt removes the whole directory


def build_manifest(
    spec: CommitSpec, layouts: Sequence[ShardLayout], reports: Sequence[ShardReport]
) -> Manifest:
    """Join the layouts of all ranks with the hashes they reported."""
    files: list[FileEntry] = []
    chunks: dict[str, list[ChunkEntry]] = defaultdict(list)
    facts: dict[str, tuple[tuple[int, ...], str]] = {}
    for layout, report in zip(layouts, reports, strict=True):
        shard = report.shard
        assert shard is not None
        files.append(FileEntry(name=layout.file_name, size=shard.size, xxh3_128=shard.xxh3_128))
        for slot, chunk_hash in zip(layout.slots, shard.chunk_hashes, strict=True):
            facts[slot.fqn] = (slot.tensor_size, DTYPE_NAMES[slot.dtype])
            chunks[slot.fqn].append(
                ChunkEntry(
                    offsets=slot.offsets,
                    sizes=slot.sizes,
                    file=layout.file_name,
                    byte_offset=slot.byte_offset,
                    length=slot.length,
                    xxh3_128=chunk_hash,
                )
            )
    return Manifest(
        step=spec.step,
        attempt=spec.directories.attempt,
        plan_fingerprint=spec.plan_fingerprint,
        world_size=spec.world_size,
        created_time_s=time.time(),
        reason=spec.reason,
        # JSON has no other numbers, and nothing can be said of such weights.
        metric=spec.metric if spec.metric and math.isfinite(spec.metric.value) else None,
        is_finite=True,  # every rank refuses to write anything else
        files=tuple(files),
        tensors={
            fqn: TensorEntry(size=size, dtype=dtype, chunks=tuple(chunks[fqn]))
            for fqn, (size, dtype) in facts.items()
        },
        state=spec.state,
    )
