"""Read a checkpoint into tensors of any layout, each byte verified before it reaches one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.tensor import DTensor

from hetero_fw.checkpoint.manifest import ChunkEntry, Manifest, TensorEntry, read_manifest
from hetero_fw.errors import CheckpointError

T = TypeVar("T")


def load_checkpoint(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    process_group: ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fill `tensors` from the checkpoint directory `path`; return its `state`.

    The tensors may be plain ones or DTensors of any layout on any number of ranks. Tensors of the
    checkpoint that are not asked for are not read. With `process_group`, all its ranks call this
    and all of them raise if one fails.

    Raises:
        CheckpointError: names are missing, sizes differ or bytes are not those that were written.
            Tensors may then be filled in part; load another checkpoint before using them.
    """

    def load() -> dict[str, Any]:
        manifest = read_manifest(path)
        fill_tensors(Path(path), manifest, tensors)
        return dict(manifest.state)

    return succeed_together(load, process_group)


def succeed_together(work: Callable[[], T], process_group: ProcessGroup | None) -> T:
    """Do `work` on every rank of the group; raise on all of them if it fails on one.

    Raises:
        CheckpointError: what went wrong, on whichever rank.
    """
    result: list[T] = []
    failure: Exception | None = None
    try:
        result.append(work())
    except Exception as error:  # noqa: BLE001  # the other ranks must hear of it
        failure = error
    own = None if failure is None else str(failure) or repr(failure)
    texts: list[str | None] = [own]
    if process_group is not None:
        texts = [None] * process_group.size()
        dist.all_gather_object(texts, own, group=process_group)
    problems = list(dict.fromkeys(text for text in texts if text is not None))
    if problems:
        raise CheckpointError("; ".join(problems)) from failure
    return result[0]


def fill_tensors(path: Path, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
    """As `load_checkpoint`, on one rank, where the manifest has been read before."""
    wanted = {fqn: tensor for fqn, tensor in tensors.items() if tensor.numel() > 0}
    _check_fit(path, manifest, wanted)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(wanted), dcp_metadata(manifest, wanted))
    items = planner.finish_plan(planner.create_local_plan()).items
    _check_coverage(path, items, wanted)
    reads = _group_by_chunk(manifest, items)
    longest = max((chunk.length for _, chunk, _ in reads), default=0)
    scratch = torch.empty(longest, dtype=torch.uint8)
    with ExitStack() as stack, torch.no_grad():
        files: dict[str, BinaryIO] = {}
        for entry, chunk, chunk_items in reads:
            if chunk.file not in files:
                files[chunk.file] = stack.enter_context(_open(path / chunk.file))
            saved = _read_chunk(path / chunk.file, files[chunk.file], chunk, entry, scratch)
            for item in chunk_items:
                source = saved[_region(item)]
                planner.resolve_tensor(item).detach().copy_(source)


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


def _check_fit(path: Path, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
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
    path: Path, items: Sequence[ReadItem], tensors: Mapping[str, torch.Tensor]
) -> None:
    """No element of a tensor keeps the value it had before."""
    covered: dict[str, int] = defaultdict(int)
    for item in items:
        covered[item.dest_index.fqn] += math.prod(item.lengths)
    for fqn, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if covered[fqn] != local.numel():
            raise CheckpointError(f"{path} does not cover tensor {fqn}")


ChunkRead = tuple[TensorEntry, ChunkEntry, list[ReadItem]]


def _group_by_chunk(manifest: Manifest, items: Sequence[ReadItem]) -> list[ChunkRead]:
    """Each chunk once, in the order in which the files hold them."""
    by_chunk: dict[MetadataIndex, list[ReadItem]] = defaultdict(list)
    for item in items:
        by_chunk[item.storage_index].append(item)
    reads = []
    for index, chunk_items in by_chunk.items():
        entry = manifest.tensors[index.fqn]
        assert index.index is not None
        reads.append((entry, entry.chunks[index.index], chunk_items))
    return sorted(reads, key=lambda read: (read[1].file, read[1].byte_offset))


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error


def _read_chunk(
    path: Path, file: BinaryIO, chunk: ChunkEntry, entry: TensorEntry, scratch: torch.Tensor
) -> torch.Tensor:
    """The verified bytes of one chunk as a tensor; valid until the next call."""
    window = scratch.numpy().data[: chunk.length]
    file.seek(chunk.byte_offset)
    rest = window
    while rest:
        count = file.readinto(rest)  # type: ignore[attr-defined]  # unbuffered files have it
        if not count:
            raise CheckpointError(f"{path}: ends before byte {chunk.byte_offset + chunk.length}")
        rest = rest[count:]
    if xxhash.xxh3_128_hexdigest(window) != chunk.xxh3_128:
        raise CheckpointError(
            f"{path}: bytes {chunk.byte_offset} to {chunk.byte_offset + chunk.length} "
            "are not those that were written (xxh3_128)"
        )
    return scratch[: chunk.length].view(entry.torch_dtype).view(chunk.sizes)


def _region(item: ReadItem) -> tuple[slice, ...]:
    return tuple(
        slice(start, start + length)
        for start, length in zip(item.storage_offsets, item.lengths, strict=True)
    )
