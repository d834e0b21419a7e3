"""Write, hash and read shard files in bounded pieces."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hetero_fw.checkpoint.save_point import OnPoint, SavePoint, pass_by
from hetero_fw.checkpoint.shard_layout import ShardLayout
from hetero_fw.checkpoint.storage import StoragePath, is_object_store, read_pieces

PIECE_BYTES = 8 * 2**20


@dataclass(frozen=True, kw_only=True)
class WrittenShard:
    """Size and hash of a shard file, and the hash of each of its chunks in layout order."""

    size: int
    xxh3_128: str
    chunk_hashes: tuple[str, ...]


def write_shard(
    path: Path, content: memoryview, layout: ShardLayout, on_point: OnPoint = pass_by
) -> WrittenShard:
    """Write `content` to the new file `path`, hash it on the way and wait for the disk.

    Hashing and writing release the interpreter lock, so training goes on beside it.

    Raises:
        OSError: the file exists or cannot be written.
    """
    chunk_hashes = tuple(
        xxhash.xxh3_128_hexdigest(content[slot.byte_offset : slot.byte_offset + slot.length])
        for slot in layout.slots
    )
    with ShardSink(path) as sink:
        for start in range(0, layout.size, PIECE_BYTES):
            on_point(SavePoint.SHARD_PIECE)
            sink.write(content[start : min(start + PIECE_BYTES, layout.size)])
        on_point(SavePoint.SHARD_WRITTEN)
        digest = sink.finish()
    return WrittenShard(size=layout.size, xxh3_128=digest, chunk_hashes=chunk_hashes)


class ShardSink:
    """The new file `path`, hashed on the way.

    Raises:
        OSError: the file exists or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._digest = xxhash.xxh3_128()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o644)

    def __enter__(self) -> ShardSink:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def write(self, piece: memoryview) -> None:
        self._digest.update(piece)
        while piece:
            piece = piece[os.write(self._descriptor, piece) :]

    def finish(self) -> str:
        """Wait for the disk; returns the hash of all bytes."""
        os.fsync(self._descriptor)
        return self._digest.hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write the new file `path` and wait for the disk."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def hash_file(path: StoragePath) -> tuple[int, str]:
    """Size and hash of the file `path`.

    Raises:
        OSError: a local file cannot be read.
        StorageError: a remote one cannot.
    """
    digest = xxhash.xxh3_128()
    size = 0
    for piece in read_pieces(path) if is_object_store(path) else _local_pieces(path):
        digest.update(piece)
        size += len(piece)
    return size, digest.hexdigest()


def _local_pieces(path: Path) -> Iterator[memoryview]:
    """The content in order; each piece is valid until the next."""
    scratch = bytearray(PIECE_BYTES)
    window = memoryview(scratch)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(scratch):
            yield window[:count]
