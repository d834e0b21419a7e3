"""Saves to an object store by one rank, step by step, without a saver."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import torch

from hetero_fw.checkpoint import (
    ChunkEntry,
    FileEntry,
    HashAlgorithm,
    Manifest,
    Metric,
    ObjectPlace,
    OnPoint,
    TensorEntry,
    read_manifest,
)
from hetero_fw.checkpoint.loading import fill_tensors
from hetero_fw.checkpoint.save_point import pass_by
from hetero_fw.checkpoint.shard_file import WrittenShard
from hetero_fw.checkpoint.shard_layout import ShardLayout, agree_on_layout
from tests.unit.checkpoint.examples import PREFIX, weights


@dataclass(frozen=True, kw_only=True)
class OneSave:
    """What a place needs to know of a save."""

    step: int
    token: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    hash: HashAlgorithm = HashAlgorithm.XXH3_128
    on_point: OnPoint = pass_by

    @property
    def name(self) -> str:
        return f"{PREFIX}-step-{self.step:08d}"


def shard_of(tensors: dict[str, torch.Tensor]) -> tuple[ShardLayout, memoryview]:
    """The layout and the bytes of all tensors as the shard of a single rank."""
    layout = agree_on_layout(tensors, rank=0, world_size=1, process_group=None).own
    content = torch.zeros(layout.size, dtype=torch.uint8)
    for slot in layout.slots:
        flat = tensors[slot.fqn].contiguous().reshape(-1).view(torch.uint8)
        content[slot.byte_offset : slot.byte_offset + slot.length] = flat
    return layout, content.numpy().data


def manifest_of(
    save: OneSave, attempt: int, layout: ShardLayout, shard: WrittenShard, **facts: Any
) -> Manifest:
    tensors = {
        slot.fqn: TensorEntry(
            size=slot.tensor_size,
            dtype=str(slot.dtype).removeprefix("torch."),
            chunks=(
                ChunkEntry(
                    offsets=slot.offsets,
                    sizes=slot.sizes,
                    file=layout.file_name,
                    byte_offset=slot.byte_offset,
                    length=slot.length,
                    digest=digest,
                ),
            ),
        )
        for slot, digest in zip(layout.slots, shard.chunk_digests, strict=True)
    }
    file = FileEntry(name=layout.file_name, size=shard.size, digest=shard.digest)
    settings: dict[str, Any] = {
        "plan_fingerprint": "plan",
        "world_size": 1,
        "created_time_s": 0.0,
        "reason": "test",
        "is_finite": True,
        **facts,
    }
    return Manifest(
        step=save.step,
        attempt=attempt,
        files=(file,),
        tensors=tensors,
        state={"step": save.step},
        hash=save.hash,
        **settings,
    )


def save_at(
    place: ObjectPlace,
    step: int,
    *,
    value: int | None = None,
    size: int = 50,
    on_point: OnPoint = pass_by,
    algorithm: HashAlgorithm = HashAlgorithm.XXH3_128,
    metric: Metric | None = None,
) -> OneSave:
    """Write and publish `weights(value)`, by default of the step, as the checkpoint of `step`."""
    save = OneSave(step=step, on_point=on_point, hash=algorithm)
    layout, content = shard_of(weights(step if value is None else value, size))
    shard = place.write_shard(save, content, layout)
    place.publish(save, manifest_of(save, place.attempt, layout, shard, metric=metric))
    return save


def value_of(path: Any, size: int = 50) -> int:
    """Which `weights` the checkpoint at `path` holds; every tensor was read and compared."""
    tensors = weights(-1, size)
    fill_tensors(path, read_manifest(path), tensors)
    value = int(tensors["model.count"])
    assert all(torch.equal(tensors[name], saved) for name, saved in weights(value, size).items())
    return value
