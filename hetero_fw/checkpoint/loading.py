"""Read a checkpoint into tensors of any layout; no byte reaches one before it was verified."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.tensor import DTensor

from hetero_fw.checkpoint.delivery import ChunkBox, Delivery, Want
from hetero_fw.checkpoint.filling import Filled, Filling
from hetero_fw.checkpoint.found import FoundCheckpoint, OnRejected
from hetero_fw.checkpoint.manifest import Manifest, read_manifest
from hetero_fw.checkpoint.ranks import Ranks
from hetero_fw.checkpoint.sources import PATIENCE_S, DamagedCheckpointError, Source, patiently
from hetero_fw.checkpoint.storage import StoragePath
from hetero_fw.checkpoint.whereabouts import Whereabouts
from hetero_fw.errors import CheckpointError


def load_checkpoint(
    path: StoragePath,
    tensors: Mapping[str, torch.Tensor],
    *,
    process_group: ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fill `tensors` from the checkpoint directory `path`; return its `state`.

    The tensors may be plain ones or DTensors of any layout on any number of ranks. Tensors of the
    checkpoint that are not asked for are not read; of the others, each byte is read by one rank.
    With `process_group`, a gloo group, all its ranks call this and all of them raise if one fails.

    Raises:
        CheckpointError: names are missing, sizes differ or bytes are not those that were written.
            Where names are missing or sizes differ, no tensor was changed; where bytes are damaged
            (DamagedCheckpointError), tensors may be filled in part.
    """
    ranks = Ranks(process_group)
    manifest = read_manifest_together(path, ranks)
    load_from(path, manifest, tensors, ranks)
    return dict(manifest.state)


def read_manifest_together(path: StoragePath, ranks: Ranks) -> Manifest:
    """The manifest of `path`, read from storage by one rank.

    Raises:
        CheckpointError: as `read_manifest`, on all ranks.
    """
    manifest, problem = None, ""
    if ranks.rank == 0:
        try:
            manifest = patiently(path, lambda: read_manifest(path), PATIENCE_S)
        except CheckpointError as error:
            problem = str(error)
    found, problem = ranks.broadcast((manifest, problem), source=0)
    if found is None:
        raise CheckpointError(problem)
    return found


def load_from(
    path: StoragePath, manifest: Manifest, tensors: Mapping[str, torch.Tensor], ranks: Ranks
) -> None:
    """As `load_checkpoint`, where the manifest has been read before."""
    source = Source(
        tier="storage", directory=path, node=None, distance=(0, 0), patience_s=PATIENCE_S
    )
    wants, boxes = _agree(str(path), manifest, tensors, ranks)
    where = Whereabouts(ranks, manifest, {0: source}, _names_in(boxes))
    _fill(where, wants, boxes, on_rejected=lambda rejection: None)


def fill_from(found: FoundCheckpoint, tensors: Mapping[str, torch.Tensor]) -> Filled:
    """Fill `tensors` from a checkpoint that was found. All its ranks call this.

    Each byte is read by one rank; what one place does not hold as it was written is read from
    another. Tensors of the checkpoint that no rank asks for are not read.

    Raises:
        CheckpointError: as `load_checkpoint`, on all ranks; also when a storage that all ranks see
            does not say whether it has what is missing. Names the storage.
        DamagedCheckpointError: bytes are nowhere as they were written. The tensors may be filled
            in part; an older checkpoint may serve.
    """
    wants, boxes = _agree(found.path, found.manifest, tensors, found.ranks)
    return _fill(found.whereabouts, wants, boxes, on_rejected=found.on_rejected)


def fill_tensors(
    path: StoragePath, manifest: Manifest, tensors: Mapping[str, torch.Tensor]
) -> None:
    """As `load_checkpoint`, on one rank, where the manifest has been read before."""
    load_from(path, manifest, tensors, Ranks(None))


def _agree(
    path: str, manifest: Manifest, tensors: Mapping[str, torch.Tensor], ranks: Ranks
) -> tuple[list[Want], list[list[ChunkBox]]]:
    """What this rank wants of the checkpoint, and what each of them does."""
    wants: list[Want] = []

    def boxes() -> list[ChunkBox]:
        wants.extend(_plan(path, manifest, _nonempty(tensors)))
        return [want.box for want in wants]

    gathered = ranks.gather_results(boxes)
    return wants, gathered


def _names_in(boxes: Sequence[Sequence[ChunkBox]]) -> list[str]:
    """Names of the tensors of which some rank wants something."""
    return sorted({box.key[0] for theirs in boxes for box in theirs})


def _fill(
    where: Whereabouts,
    wants: Sequence[Want],
    boxes: Sequence[Sequence[ChunkBox]],
    *,
    on_rejected: OnRejected,
) -> Filled:
    delivery = Delivery(where.ranks, where.manifest, wants, boxes)
    filling = Filling(where, _names_in(boxes), delivery)
    filling.run()
    filled = filling.result()
    if where.is_hopeless:
        where.raise_silence()
    rejections = where.take_rejections()
    for rejection in rejections:
        on_rejected(rejection)
    if where.is_hopeless:
        raise DamagedCheckpointError(rejections, bytes_read=filled.bytes_read, read_s=filled.read_s)
    return filled


def _nonempty(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {fqn: tensor for fqn, tensor in tensors.items() if tensor.numel() > 0}


def _plan(path: str, manifest: Manifest, wanted: Mapping[str, torch.Tensor]) -> list[Want]:
    """Which parts of which chunks this rank wants, and where they go."""
    _check_fit(path, manifest, wanted)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(wanted), dcp_metadata(manifest, wanted))
    items = planner.finish_plan(planner.create_local_plan()).items
    _check_coverage(path, items, wanted)
    return [_want(planner, item) for item in items]


def _want(planner: DefaultLoadPlanner, item: ReadItem) -> Want:
    index = item.storage_index.index
    assert index is not None
    box = ChunkBox(
        key=(item.storage_index.fqn, index),
        offsets=tuple(item.storage_offsets),
        lengths=tuple(item.lengths),
    )
    return Want(box=box, target=lambda: planner.resolve_tensor(item).detach())


def dcp_metadata(manifest: Manifest, names: Mapping[str, object]) -> Metadata:
    """The part of `manifest` that PyTorch's load planner needs for `names`."""
    return Metadata(
        {
            fqn: TensorStorageMetadata(
                properties=TensorProperties(dtype=manifest.tensors[fqn].torch_dtype),
                size=torch.Size(manifest.tensors[fqn].size),
                chunks=[
                    ChunkStorageMetadata(
                        offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes)
                    )
                    for chunk in manifest.tensors[fqn].chunks
                ],
            )
            for fqn in names
        }
    )


def _check_fit(path: str, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
    missing = [fqn for fqn in tensors if fqn not in manifest.tensors]
    if missing:
        raise CheckpointError(f"{path} has no tensors named {', '.join(missing)}")
    problems = []
    for fqn, tensor in tensors.items():
        entry = manifest.tensors[fqn]
        if entry.size != tuple(tensor.shape):
            problems.append(f"{fqn} is {list(entry.size)}, expected {list(tensor.shape)}")
        elif entry.torch_dtype != tensor.dtype and not (
            entry.torch_dtype.is_floating_point and tensor.dtype.is_floating_point
        ):
            problems.append(f"{fqn} is {entry.dtype}, expected {tensor.dtype}")
    if problems:
        raise CheckpointError(f"{path} holds tensors of another shape: {'; '.join(problems)}")


def _check_coverage(
    path: str, items: Sequence[ReadItem], tensors: Mapping[str, torch.Tensor]
) -> None:
    """No element of a tensor keeps the value it had before."""
    covered: dict[str, int] = defaultdict(int)
    for item in items:
        covered[item.dest_index.fqn] += math.prod(item.lengths)
    for fqn, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if covered[fqn] != local.numel():
            raise CheckpointError(f"{path} does not cover tensor {fqn}")
