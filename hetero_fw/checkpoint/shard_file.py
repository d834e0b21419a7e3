"""Write, hash and read shard files in bounded pieces."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hetero_fw.checkpoint.hashing import HashAlgorithm, hexdigest, new_hasher
from hetero_fw.checkpoint.save_point import OnPoint, SavePoint, pass_by
from hetero_fw.checkpoint.shard_layout import ShardLayout
from hetero_fw.checkpoint.storage import StoragePath, is_object_store, open_regular, read_pieces

PIECE_BYTES = 8 * 2**20


@dataclass(frozen=True, kw_only=True)
class WrittenShard:
    """Size and hash of a shard file, and the hash of each of its chunks in layout order."""

    size: int
    digest: str
    chunk_digests: tuple[str, ...]


def write_shard(
    path: Path,
    content: memoryview,
    layout: ShardLayout,
    algorithm: HashAlgorithm,
    on_point: OnPoint = pass_by,
) -> WrittenShard:
    """Write `content` to the new file `path`, hash it on the way and wait for the disk.

    Hashing and writing release the interpreter lock, so training goes on beside it.

    Raises:
        OSError: the file exists or cannot be written.
    """
    chunk_digests = hash_chunks(content, layout, algorithm)
    with ShardSink(path, algorithm) as sink:
        for start in range(0, layout.size, PIECE_BYTES):
            on_point(SavePoint.SHARD_PIECE)
            sink.write(content[start : min(start + PIECE_BYTES, layout.size)])
        on_point(SavePoint.SHARD_WRITTEN)
        digest = sink.finish()
    return WrittenShard(size=layout.size, digest=digest, chunk_digests=chunk_digests)


def hash_chunks(
    content: memoryview, layout: ShardLayout, algorithm: HashAlgorithm
) -> tuple[str, ...]:
    """The hash of each chunk of a shard, in layout order."""
    return tuple(
        hexdigest(algorithm, content[slot.byte_offset : slot.byte_offset + slot.length])
        for slot in layout.slots
    )


class ShardSink:
    """The new file `path`, hashed on the way.

    Raises:
        OSError: the file exists or cannot be written.
    """

    def __init__(self, path: Path, algorithm: HashAlgorithm) -> None:
        self._hasher = new_hasher(algorithm)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o644)

    def __enter__(self) -> ShardSink:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def write(self, piece: memoryview) -> None:
        self._hasher.update(piece)
        while piece:
            piece = piece[os.write(self._descriptor, piece) :]

    def finish(self) -> str:
        """Wait for the disk; returns the hash of all bytes."""
        os.fsync(self._descriptor)
        return self._hasher.hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write the new file `path` and wait for the disk."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


class FileHash:
    """Hash of a file that is read in one go or in several.

    Attributes:
        size: bytes that were read so far.
    """

    def __init__(self, path: StoragePath, algorithm: HashAlgorithm) -> None:
        self.path = path
        self.algorithm = algorithm
        self.size = 0
        self._hasher = new_hasher(algorithm)

    def read_on(self, go_on: Callable[[], bool] = lambda: True) -> bool:
        """Read until `go_on`, called after every piece, returns False; whether the end was seen.

        Raises:
            OSError: a local file cannot be read.
            StorageError: a remote one cannot. What was read counts in both cases.
        """
        for piece in self._pieces():
            self._hasher.update(memoryview(piece))
            self.size += len(piece)
            if not go_on():
                return False
        return True

    def _pieces(self) -> Iterator[bytes | memoryview]:
        if is_object_store(self.path):
            return read_pieces(self.path, self.size)
        return _local_pieces(self.path, self.size)

    def hexdigest(self) -> str:
        """Hash of what was read so far."""
        return self._hasher.hexdigest()


def _local_pieces(path: Path, start: int) -> Iterator[memoryview]:
    """The content from byte `start`, in order; each piece is valid until the next."""
    scratch = bytearray(PIECE_BYTES)
    window = memoryview(scratch)
    with open_regular(path) as file:
        file.seek(start)
        while count := file.readinto(scratch):
            yield window[:count]
