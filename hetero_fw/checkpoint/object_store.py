"""The objects below one directory of a remote storage: list, read, put, delete.

Every error of a client leaves here as one readable StorageError. Requests have a time limit here as
well: s3fs does not apply its own while it sends, and its retries and those below it add up.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractBufferedFile
from upath import UPath

from hetero_fw.checkpoint.storage import (
    FOLDERLESS,
    REQUEST_TIMEOUT_S,
    SLOWEST_BYTES_PER_S,
    StorageError,
    storage_errors,
)

PART_BYTES = 16 * 2**20
NUM_CONCURRENT_PARTS = 8
_MAX_PARTS = 9_000  # S3 allows 10,000
# Storages without directories: nothing to make before a file, nothing to remove after it.
_FLAT = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "memory"}

OnPiece = Callable[[memoryview], None]


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """An object as a listing shows it."""

    size: int
    modified: float


class ObjectStore:
    """Objects by their key relative to `root`. Safe after fork; connects when it is first used.

    Args:
        root: a directory of a remote storage, from `open_root`.
    """

    def __init__(self, root: UPath) -> None:
        self._root = root
        self._fs = root.fs
        self._prefix = root.path.rstrip("/") + "/"
        self._has_parts = _is_s3(root)
        # Only clients that run on fsspec's event loop can be told to give up.
        self._limit: dict[str, Any] = {"timeout": REQUEST_TIMEOUT_S} if self._fs.async_impl else {}

    @property
    def root(self) -> UPath:
        return self._root

    def list(self, folder: str = "") -> dict[str, StoredObject]:
        """All objects, or those in `folder`, by key; none if there is no such place.

        Raises:
            StorageError: the storage does not say; also if the bucket does not exist.
        """
        with self._errors(folder):
            try:
                found = self._find(self._path(folder).rstrip("/"))
            except FileNotFoundError:
                if self._root.protocol in FOLDERLESS:
                    raise
                found = {}
            return {
                str(path).removeprefix(self._prefix): StoredObject(
                    size=int(info["size"] or 0), modified=_modified(info)
                )
                for path, info in found.items()
                if str(path).startswith(self._prefix) and info["type"] == "file"
            }

    def read(self, key: str) -> bytes:
        """The whole content of a small object."""
        with self._errors(key):
            content: bytes = self._fs.cat_file(self._path(key), **self._limit)
            return bytes(content)

    def put(self, key: str, content: bytes) -> None:
        """Create or replace a small object in one request, so that it is never seen in part."""
        self._make_folder(key)
        with self._errors(key):
            self._fs.pipe_file(self._path(key), content, **self._limit)

    def put_new(self, key: str, content: bytes) -> None:
        """Create a small object that is not there, atomically where the storage can.

        `content` must be unlike anybody else's. What is stored is read back, since a storage may
        ignore the condition, and since a request may succeed whose answer is lost.

        Raises:
            StorageError: somebody else's is there, or the storage refuses.
        """
        self._make_folder(key)
        refused: Exception | None = None
        try:
            with self._errors(key):
                self._fs.pipe_file(self._path(key), content, mode="create", **self._limit)
        except StorageError as error:
            refused = error
            if _has_no_condition(error.__cause__) and key not in self.list(key.rpartition("/")[0]):
                self.put(key, content)
        try:
            stored = self.read(key)
        except StorageError as error:
            raise refused or error from error
        if stored != content:
            raise StorageError(f"{self._root / key}: somebody else's is there", is_transient=False)

    def upload(self, key: str, content: memoryview, on_piece: OnPiece) -> None:
        """Create or replace an object of any size; it appears whole, when all of it has arrived.

        On S3 the parts go up side by side. `on_piece` is called for each piece, in order, before
        it is sent; it may be called from another thread.

        Raises:
            StorageError: the storage refuses it or takes too long.
        """
        self._make_folder(key)
        with self._errors(key):
            if self._has_parts:
                self._upload_parts(key, content, on_piece)
            else:
                self._stream(key, content, on_piece)

    def delete(self, keys: Collection[str]) -> None:
        """Delete exactly these objects; what is gone already is no error."""
        if len(keys) > 1 and self._fs.async_impl:
            with self._errors(""), suppress(FileNotFoundError):
                self._fs.rm([self._path(key) for key in keys], **self._limit)
            return
        for key in keys:  # not every client takes several
            with self._errors(key), suppress(FileNotFoundError):
                self._fs.rm_file(self._path(key), **self._limit)

    def remove_folder(self, folder: str) -> None:
        """Remove an empty directory, where the storage has directories."""
        if not self._is_flat:
            with suppress(Exception):  # somebody has put something into it, or it is gone
                # That of HDFS through pyarrow deletes what is in it as well.
                if not self._fs.ls(self._path(folder), detail=False):
                    self._fs.rmdir(self._path(folder))

    def abort_uploads(self, is_dead: Callable[[str], bool]) -> None:
        """Give up multipart uploads that were never completed, of the keys that `is_dead` accepts.

        They are invisible, but are paid for. Only S3 shows them.
        """
        if not self._has_parts:
            return
        bucket, prefix, _ = self._fs.split_path(self._prefix)
        with self._errors(""):
            page: Mapping[str, Any] = {}
            while True:
                markers = {
                    name: page[f"Next{name}"]
                    for name in ("KeyMarker", "UploadIdMarker")
                    if page.get(f"Next{name}")
                }
                page = self._fs.call_s3(
                    "list_multipart_uploads",
                    Bucket=bucket,
                    Prefix=prefix,
                    **markers,
                    **self._limit,
                )
                for upload in page.get("Uploads") or ():
                    if is_dead(upload["Key"].removeprefix(prefix)):
                        with suppress(FileNotFoundError):  # it was completed or given up meanwhile
                            self._fs.abort_mpu(
                                bucket, upload["Key"], upload["UploadId"], **self._limit
                            )
                if not page.get("IsTruncated"):
                    return

    def _find(self, path: str) -> dict[str, Any]:
        """What is at `path` or below, but directories, by path."""
        if not _walks(self._fs):
            found: dict[str, Any] = self._fs.find(path, detail=True, **self._limit)
            return found
        # That of fsspec takes every directory that it cannot list for an empty one.
        found, pending = {}, [path]
        while pending:
            with suppress(FileNotFoundError):  # it is deleted meanwhile
                for info in self._fs.ls(pending.pop(), detail=True, **self._limit):
                    if info["type"] != "directory":
                        found[info["name"]] = info
                    elif info["name"].rstrip("/") != path:
                        pending.append(info["name"])
        return found

    @property
    def _is_flat(self) -> bool:
        return self._root.protocol in _FLAT

    def _upload_parts(self, key: str, content: memoryview, on_piece: OnPiece) -> None:
        part_bytes = max(PART_BYTES, math.ceil(content.nbytes / _MAX_PARTS))
        parts = _Parts(content, on_piece)
        timeout_s = REQUEST_TIMEOUT_S + content.nbytes / SLOWEST_BYTES_PER_S
        # s3fs sends anything smaller than this in one request, which takes bytes alone.
        is_single = content.nbytes < 2 * part_bytes
        # Of its ways to write a file this is the one that sends parts side by side: an open S3File
        # sends them one after another.
        self._fs.pipe_file(
            self._path(key),
            parts[: content.nbytes] if is_single else parts,
            chunksize=part_bytes,
            max_concurrency=NUM_CONCURRENT_PARTS,
            timeout=timeout_s,
        )

    def _stream(self, key: str, content: memoryview, on_piece: OnPiece) -> None:
        file = self._fs.open(self._path(key), "wb", block_size=PART_BYTES)
        try:
            for start in range(0, content.nbytes, PART_BYTES):
                piece = content[start : start + PART_BYTES]
                on_piece(piece)
                file.write(piece)
        except BaseException:
            # Closing it would send the rest and complete it, so that it appears cut off. What was
            # begun is invisible and forgotten by the storage after some days.
            if isinstance(file, AbstractBufferedFile):
                file.closed = True
            raise
        file.close()

    def _make_folder(self, key: str) -> None:
        if not self._is_flat:
            with self._errors(key):
                self._fs.makedirs(self._path(key.rpartition("/")[0]), exist_ok=True)

    def _path(self, key: str) -> str:
        return f"{self._prefix}{key}"

    def _errors(self, key: str) -> Any:
        return storage_errors(self._root / key if key else self._root, self._root.storage_options)


class _Parts:
    """Bytes that are copied only when s3fs takes a slice of them, a part at a time."""

    def __init__(self, content: memoryview, on_piece: OnPiece) -> None:
        self._content = content
        self._on_piece = on_piece

    def __len__(self) -> int:
        return self._content.nbytes

    def __getitem__(self, index: slice) -> bytes:
        piece = self._content[index]
        self._on_piece(piece)
        return bytes(piece)


def _has_no_condition(error: BaseException | None) -> bool:
    """Whether a client or a storage does not know how to create only."""
    is_refused = isinstance(error, RuntimeError | ValueError | TypeError)
    return is_refused or (isinstance(error, OSError) and error.errno == errno.ENOSYS)


def _walks(client: AbstractFileSystem) -> bool:
    """Whether a client has no listing of its own of all that is below a directory."""
    own, inherited = type(client), (AsyncFileSystem._find, AbstractFileSystem.find)
    return (own._find if client.async_impl else own.find) in inherited


def _is_s3(root: UPath) -> bool:
    return root.protocol in ("s3", "s3a")


def _modified(info: Mapping[str, Any]) -> float:
    """When it was put, by the storage's clock; 0 where the storage does not tell."""
    for name in ("LastModified", "mtime", "updated", "last_modified", "created"):
        value = info.get(name)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            return value.timestamp()
    return 0.0
