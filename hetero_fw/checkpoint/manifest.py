"""The manifest: what a checkpoint consists of, down to the hash of every tensor chunk.

It is JSON, carries a hash of itself and is the last file written. Readers take only the version
they know and ignore keys that they do not know, so later writers can add facts.

`hash` names the algorithm of the entries, whose digests stand under its name; where there is none,
it is xxh3_128. The manifest's hash of itself is always xxh3_128: it finds accidents, and no other
could do more, as whoever changes the text can change the hash in it too. It is also compared
before `hash` is looked at, so that an algorithm that is unknown here is not taken for damage.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from hetero_fw.checkpoint.hashing import HashAlgorithm, hexdigest
from hetero_fw.checkpoint.storage import (
    NoRegularFileError,
    StorageError,
    StoragePath,
    read_bytes,
)
from hetero_fw.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
FORMAT = "hetero_fw.checkpoint"
VERSION = 1

# The manifest's hash of itself.
OWN_HASH = HashAlgorithm.XXH3_128

# The only dtypes that a manifest can name: a name is looked up here, never in torch itself.
DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
        torch.bool,
    )
}


class NewerFormatError(CheckpointError):
    """A checkpoint of a release after this one, which may well be sound."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One shard file: its name in the checkpoint directory, its size and the hash of its bytes."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class ChunkEntry:
    """A rectangular part of a tensor: where it lies in the tensor and where in which file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    byte_offset: int
    length: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor by its global size; its chunks cover it without overlap."""

    size: tuple[int, ...]
    dtype: str
    chunks: tuple[ChunkEntry, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """How good the weights are: a finite value of what the run monitors."""

    name: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint except the tensor bytes.

    Attributes:
        tensors: by fully qualified name, for example `model.blocks.0.weight`.
        state: what is not a tensor: scheduler, loss scale, hyper-parameters, positions.
        reason: why the checkpoint was made.
        is_finite: every floating-point value was checked to be finite before it was written.
        metric: None if nothing is monitored or no value is known.
        hash: what the digests of files and chunks are made with.
    """

    step: int
    attempt: int
    plan_fingerprint: str
    world_size: int
    created_time_s: float
    reason: str
    is_finite: bool
    files: tuple[FileEntry, ...]
    tensors: Mapping[str, TensorEntry]
    state: Mapping[str, Any]
    metric: Metric | None = None
    version: int = VERSION
    hash: HashAlgorithm = HashAlgorithm.XXH3_128

    @property
    def size_bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(file.size for file in self.files)

    def is_of_same_save(self, other: Manifest) -> bool:
        """Whether both are of one save, in the same place or in several."""
        mine = (self.attempt, self.step, self.created_time_s)
        return mine == (other.attempt, other.step, other.created_time_s)

    def to_json(self) -> str:
        """Text of `manifest.json`, with its own hash."""
        payload = {"format": FORMAT, **asdict(self)}
        chunks = (chunk for tensor in payload["tensors"].values() for chunk in tensor["chunks"])
        for entry in chain(payload["files"], chunks):
            entry[self.hash.value] = entry.pop("digest")
        return json.dumps({OWN_HASH.value: _payload_hash(payload), **payload})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read the text of `to_json`.

        Raises:
            CheckpointError: it is not a manifest, was changed, or contradicts itself.
            NewerFormatError: a newer release wrote it.
        """
        payload = _verified_payload(text)
        try:
            manifest = _from_payload(payload)
            _check_consistency(manifest)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise CheckpointError(f"the manifest lacks or garbles a field: {error!r}") from error
        return manifest


def read_manifest(path: StoragePath) -> Manifest:
    """Read the manifest of the checkpoint directory `path`; no tensor is read.

    Raises:
        CheckpointError: it is missing, unreadable or was changed. Names the file.
        NewerFormatError: a newer release wrote it.
        StorageError: a remote storage refuses or does not answer.
    """
    file = path / MANIFEST_NAME
    try:
        return Manifest.from_json(read_bytes(file).decode("utf-8"))
    except (StorageError, NoRegularFileError):
        raise
    except NewerFormatError as error:
        raise NewerFormatError(f"{file}: {error}") from error
    except (OSError, UnicodeDecodeError, CheckpointError) as error:
        raise CheckpointError(f"{file}: {error}") from error


def _payload_hash(payload: Mapping[str, Any]) -> str:
    try:
        canonical = json.dumps(payload, sort_keys=True, separators=(",", ":"))
    except RecursionError as error:  # the reader takes what nests a little deeper
        raise CheckpointError(f"not valid JSON ({error})") from error
    return hexdigest(OWN_HASH, canonical.encode())


def _verified_payload(text: str) -> dict[str, Any]:
    try:
        payload = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not valid JSON ({error})") from error
    if not isinstance(payload, dict) or payload.get("format") != FORMAT:
        raise CheckpointError(f"not a checkpoint manifest (its format is not {FORMAT!r})")
    version = payload.get("version")
    is_newer = isinstance(version, int) and version > VERSION
    declared = payload.pop(OWN_HASH.value, None)
    # First of all, so that a damaged version is no newer release. One that is newer may have
    # another way to tell, but not a wrong hash of this one.
    if declared != _payload_hash(payload) and not (is_newer and declared is None):
        raise CheckpointError("the manifest does not match its own hash; it was changed or torn")
    if is_newer:
        raise NewerFormatError(
            f"is of a newer release: its format has version {version}, this release reads {VERSION}"
        )
    if version != VERSION:
        raise CheckpointError(f"manifest version {version!r} is none; this release reads {VERSION}")
    return payload


def _algorithm(payload: Mapping[str, Any]) -> HashAlgorithm:
    name = str(payload.get("hash", HashAlgorithm.XXH3_128))
    if name not in tuple(HashAlgorithm):
        raise NewerFormatError(
            f"is of a newer release: its files are hashed with {name!r}, this release knows "
            + ", ".join(HashAlgorithm)
        )
    return HashAlgorithm(name)


def _from_payload(payload: Mapping[str, Any]) -> Manifest:
    algorithm = _algorithm(payload)
    return Manifest(
        step=int(payload["step"]),
        attempt=int(payload["attempt"]),
        plan_fingerprint=str(payload["plan_fingerprint"]),
        world_size=int(payload["world_size"]),
        created_time_s=float(payload["created_time_s"]),
        reason=str(payload["reason"]),
        is_finite=bool(payload["is_finite"]),
        files=tuple(
            FileEntry(name=str(file["name"]), size=int(file["size"]), digest=str(file[algorithm]))
            for file in payload["files"]
        ),
        tensors={fqn: _tensor_entry(entry, algorithm) for fqn, entry in payload["tensors"].items()},
        state=dict(payload["state"]),
        metric=_metric(payload.get("metric")),
        hash=algorithm,
    )


def _metric(entry: Mapping[str, Any] | None) -> Metric | None:
    if entry is None:
        return None
    value = float(entry["value"])
    return Metric(name=str(entry["name"]), value=value) if math.isfinite(value) else None


def _tensor_entry(entry: Mapping[str, Any], algorithm: HashAlgorithm) -> TensorEntry:
    chunks = tuple(
        ChunkEntry(
            offsets=tuple(map(int, chunk["offsets"])),
            sizes=tuple(map(int, chunk["sizes"])),
            file=str(chunk["file"]),
            byte_offset=int(chunk["byte_offset"]),
            length=int(chunk["length"]),
            digest=str(chunk[algorithm]),
        )
        for chunk in entry["chunks"]
    )
    return TensorEntry(
        size=tuple(map(int, entry["size"])), dtype=str(entry["dtype"]), chunks=chunks
    )


def _check_consistency(manifest: Manifest) -> None:
    """Refuse what no writer of ours writes, whoever made the hash match it."""
    sizes = {file.name: file.size for file in manifest.files}
    for name in sizes:
        if Path(name).name != name or name in ("", "..", MANIFEST_NAME):
            raise CheckpointError(f"{name!r} is not a name of a shard file in this directory")
    for fqn, tensor in manifest.tensors.items():
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"tensor {fqn} has the unknown dtype {tensor.dtype!r}")
        if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
            raise CheckpointError(f"the chunks of tensor {fqn} do not cover its size {tensor.size}")
        if not all(_is_sound(chunk, tensor, sizes) for chunk in tensor.chunks):
            raise CheckpointError(f"a chunk of tensor {fqn} lies outside its tensor or its file")


def _is_sound(chunk: ChunkEntry, tensor: TensorEntry, file_sizes: Mapping[str, int]) -> bool:
    num_dims = len(tensor.size)
    if len(chunk.offsets) != num_dims or len(chunk.sizes) != num_dims:
        return False
    is_inside = all(
        offset >= 0 and size > 0 and offset + size <= whole
        for offset, size, whole in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
    )
    fills = chunk.length == math.prod(chunk.sizes) * tensor.torch_dtype.itemsize
    end = chunk.byte_offset + chunk.length
    return is_inside and fills and chunk.byte_offset >= 0 and end <= file_sizes.get(chunk.file, -1)
