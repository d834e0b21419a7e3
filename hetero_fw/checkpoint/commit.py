"""From the parts of all ranks to the manifest of one checkpoint."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hetero_fw.checkpoint.hashing import HashAlgorithm
from hetero_fw.checkpoint.manifest import (
    DTYPES,
    ChunkEntry,
    FileEntry,
    Manifest,
    Metric,
    TensorEntry,
)
from hetero_fw.checkpoint.save_point import OnPoint, pass_by
from hetero_fw.checkpoint.shard_layout import ShardLayout
from hetero_fw.checkpoint.verdict import ShardReport

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class SaveSpec:
    """What is known of a checkpoint before a byte of it is written.

    Attributes:
        name: of the directory it is published as.
        token: unlike any other save's of the attempt, the same on all ranks.
        hash: what files and chunks are hashed with.
        metric: how good the weights are, if that is known.
        created_time_s: when it was begun; the same in all tiers, whose manifests are then equal, so
            that they can stand in for each other file by file.
        state: JSON values; rank 0 fills it.
        on_point: called at every point that the save passes.
    """

    name: str
    token: str
    step: int
    attempt: int
    plan_fingerprint: str
    world_size: int
    reason: str
    hash: HashAlgorithm
    metric: Metric | None = None
    created_time_s: float = field(default_factory=time.time)
    on_point: OnPoint = pass_by
    state: dict[str, Any] = field(default_factory=dict)


def build_manifest(
    spec: SaveSpec, layouts: Sequence[ShardLayout], reports: Sequence[ShardReport]
) -> Manifest:
    """Join the layouts of all ranks with the hashes they reported."""
    files: list[FileEntry] = []
    chunks: dict[str, list[ChunkEntry]] = defaultdict(list)
    facts: dict[str, tuple[tuple[int, ...], str]] = {}
    for layout, report in zip(layouts, reports, strict=True):
        shard = report.shard
        assert shard is not None
        files.append(FileEntry(name=layout.file_name, size=shard.size, digest=shard.digest))
        for slot, digest in zip(layout.slots, shard.chunk_digests, strict=True):
            facts[slot.fqn] = (slot.tensor_size, DTYPE_NAMES[slot.dtype])
            chunks[slot.fqn].append(
                ChunkEntry(
                    offsets=slot.offsets,
                    sizes=slot.sizes,
                    file=layout.file_name,
                    byte_offset=slot.byte_offset,
                    length=slot.length,
                    digest=digest,
                )
            )
    return Manifest(
        step=spec.step,
        attempt=spec.attempt,
        plan_fingerprint=spec.plan_fingerprint,
        world_size=spec.world_size,
        created_time_s=spec.created_time_s,
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
        hash=spec.hash,
    )
