"""Read a checkpoint into tensors of any layout, all of it verified before a byte reaches one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
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

from hetero_fw.checkpoint.delivery import Delivery, Want
from hetero_fw.checkpoint.held import HeldCheckpoint
from hetero_fw.checkpoint.holding import hold_checkpoint
from hetero_fw.checkpoint.manifest import Manifest, read_manifest
from hetero_fw.checkpoint.ranks import Ranks
from hetero_fw.checkpoint.sources import PATIENCE_S, Source, patiently, rejected
from hetero_fw.checkpoint.storage import StoragePath
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
            No tensor was changed.
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

    def wanted() -> list[str]:
        asked = _nonempty(tensors)
        _check_fit(str(path), manifest, asked)
        return list(asked)

    names = set().union(*ranks.gather_results(wanted))
    fill_from(hold_directory(path, manifest, names, ranks), tensors)


def hold_directory(
    path: StoragePath, manifest: Manifest, names: Collection[str], ranks: Ranks
) -> HeldCheckpoint:
    """Read and verify the tensors `names` of the checkpoint at `path`, which all ranks see.

    Raises:
        CheckpointError: bytes are not those that were written.
    """
    source = Source(
        tier="storage", directory=path, node=None, distance=(0, 0), patience_s=PATIENCE_S
    )
    held, problems = hold_checkpoint(ranks, manifest, {0: source}, sorted(names))
    if held is None:
        raise rejected(problems)
    return held


def fill_from(held: HeldCheckpoint, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill `tensors` with what the ranks hold, and give its memory back. All ranks call it, once.

    Raises:
        CheckpointError: as `load_checkpoint`, on all ranks; no tensor was changed, unless copying
            into one failed.
    """
    wanted = _nonempty(tensors)
    delivery = Delivery(held)
    needs = held.ranks.gather_results(lambda: delivery.prepare(_plan(held, wanted)))
    delivery.run(needs)


def fill_tensors(
    path: StoragePath, manifest: Manifest, tensors: Mapping[str, torch.Tensor]
) -> None:
    """As `load_checkpoint`, on one rank, with the bytes of one tensor at a time beside the tensors.

    For tensors that nothing depends on yet: those before a damaged one are filled.
    """
    for fqn, tensor in tensors.items():
        load_from(path, manifest, {fqn: tensor}, Ranks(None))


def _nonempty(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {fqn: tensor for fqn, tensor in tensors.items() if tensor.numel() > 0}


def _plan(held: HeldCheckpoint, wanted: Mapping[str, torch.Tensor]) -> list[Want]:
    """Which parts of which chunks this rank wants, and where they go."""
    _check_fit(held.path, held.manifest, wanted)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(wanted), dcp_metadata(held.manifest, wanted))
    items = planner.finish_plan(planner.create_local_plan()).items
    _check_coverage(held.path, items, wanted)
    return [_want(planner, item) for item in items]


def _want(planner: DefaultLoadPlanner, item: ReadItem) -> Want:
    index = item.storage_index.index
    assert index is not None
    return Want(
        key=(item.storage_index.fqn, index),
        offsets=tuple(item.storage_offsets),
        lengths=tuple(item.lengths),
        target=lambda: planner.resolve_tensor(item).detach(),
    )


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
