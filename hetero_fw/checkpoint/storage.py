"""Where checkpoints lie: a directory that the operating system knows, or a remote storage by URL.

A remote storage is reached through fsspec and named by a `UPath`, which carries what the client
needs to log in. Its text and its `repr` do not show that.
"""

from __future__ import annotations

import errno
import os
import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.registry import known_implementations
from typing_extensions import TypeIs
from upath import UPath

from hetero_fw.checkpoint.storage_error import kind_of
from hetero_fw.errors import CheckpointError, ConfigError, did_you_mean
from hetero_fw.monitoring import without_secrets
from hetero_fw.policies import StorageErrorKind

StoragePath = Path | UPath

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 30
# The writer of checkpoints has its own retries with longer pauses; these only bridge a hiccup.
NUM_ATTEMPTS = 2
# They apply neither while s3fs sends nor to all tries together.
REQUEST_TIMEOUT_S = 60.0
# What is slower than this is not going to end; whoever waits for it may give up sooner.
SLOWEST_BYTES_PER_S = 1e6

PIECE_BYTES = 8 * 2**20
NUM_PIECES_AHEAD = 8

# fsspec lets go of its clients in a forked process. They must not be taken apart there: closing
# their connections takes these out of the epoll set, which the parent still waits on, and its next
# request hangs until it times out. Held here, they are left alone.
_CLIENTS: dict[str, AbstractFileSystem] = {}

_S3 = ("s3", "s3a")
_GOOGLE = ("gs", "gcs")
# A folder that holds nothing is none there, so that what is not found when listing is the bucket.
FOLDERLESS = (*_S3, *_GOOGLE)
_LOCAL = ("", "file", "local")


class StorageError(CheckpointError):
    """A remote storage refuses or does not answer.

    Attributes:
        is_transient: whether the same request may succeed later.
        is_absent: whether it says that there is no such object.
    """

    def __init__(self, message: str, *, is_transient: bool, is_absent: bool = False) -> None:
        super().__init__(message)
        self.is_transient = is_transient
        self.is_absent = is_absent

    def __reduce__(self) -> Any:
        return _storage_error, (str(self), self.is_transient, self.is_absent)


class StorageHangs(CheckpointError):
    """The storage did not answer in time; asking it for anything else would take as long."""

    def __init__(self, message: str = "the storage did not answer in time") -> None:
        super().__init__(message)


class NoRegularFileError(CheckpointError):
    """Something else stands in the place of a file. Names it."""


def _storage_error(message: str, is_transient: bool, is_absent: bool) -> StorageError:
    return StorageError(message, is_transient=is_transient, is_absent=is_absent)


def scheme_of(location: str) -> str:
    """The scheme of a URL; "" for a plain path and for `file://`, which name a local directory."""
    scheme, separator, _ = location.partition("://")
    return scheme if separator and scheme not in _LOCAL else ""


def is_object_store(path: StoragePath) -> TypeIs[UPath]:
    """Whether `path` is on a remote storage, without renames and without locks."""
    return not isinstance(path, Path)


def open_root(location: str, options: Mapping[str, Any] | None = None) -> StoragePath:
    """The directory that `location` names, in the process that calls this. Connects to nothing.

    Listings are never cached. The client's time-outs and retries are bounded where it has any: s3fs
    and botocore below it both retry, and their numbers multiply.

    Args:
        location: a URL, or a path of the operating system.
        options: for the file system's constructor; they win over what is set here.

    Raises:
        ConfigError: the scheme is unknown, its package is not installed, or it refuses `options`.
    """
    scheme = scheme_of(location)
    if not scheme:
        local = Path(location.partition("://")[2] if "://" in location else location)
        return local.expanduser().absolute()
    if scheme not in known_implementations:
        raise ConfigError(unknown_scheme(location))
    merged = _client_options(scheme, options or {})
    # It works, though universal_pathlib has no class of its own for it.
    warnings.filterwarnings("ignore", message="UPath 'webhdfs' filesystem not explicitly")
    try:
        root = _opened(scheme, location.rstrip("/"), merged)
    except ImportError as error:
        raise ConfigError(_missing_package(scheme, error)) from error
    except (OSError, TypeError, ValueError, KeyError) as error:
        reason = describe_error(error, options or {})
        raise ConfigError(f"{location}: its client cannot be set up ({reason}).") from error
    return root


def unknown_scheme(location: str) -> str:
    """What is wrong with a URL whose scheme fsspec does not know."""
    scheme = scheme_of(location)
    near = did_you_mean(scheme, known_implementations)
    return (
        f"{scheme}:// is no storage that fsspec knows.{near} Give a path, or a URL such as "
        "s3://bucket/folder, gs://bucket/folder or hdfs://host/folder."
    )


def open_regular(path: Path) -> FileIO:
    """Open a local file to read it, unbuffered.

    Raises:
        OSError: it cannot be opened.
        NoRegularFileError: a pipe would be waited for, and a device never ends.
    """
    file = FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NoRegularFileError(f"{path}: is no regular file")
    return file


def read_bytes(file: StoragePath) -> bytes:
    """The whole content of a small file.

    Raises:
        OSError: a local file cannot be read.
        NoRegularFileError: it is none.
        StorageError: a remote one cannot.
    """
    if not is_object_store(file):
        with open_regular(file) as stream:
            return stream.read()
    with storage_errors(file, file.storage_options):
        return bytes(file.fs.cat_file(file.path, **request_limit(file.fs)))


def read_pieces(file: UPath, begin: int = 0) -> Iterator[bytes]:
    """The content of a remote file from byte `begin`, some pieces being fetched side by side.

    Raises:
        StorageError: it cannot be read.
    """
    with storage_errors(file, file.storage_options):
        size = int(file.fs.info(file.path, **request_limit(file.fs))["size"])
    window = NUM_PIECES_AHEAD * PIECE_BYTES
    for first in range(begin, size, window):
        starts = list(range(first, min(first + window, size), PIECE_BYTES))
        ends = [min(start + PIECE_BYTES, size) for start in starts]
        yield from read_ranges(file, starts, ends)


def read_ranges(file: UPath, starts: Sequence[int], ends: Sequence[int]) -> list[bytes]:
    """Ranges of bytes of a remote file, fetched side by side where its client can.

    Raises:
        StorageError: they cannot be read.
    """
    limit = request_limit(file.fs, sum(ends) - sum(starts))
    with storage_errors(file, file.storage_options):
        pieces: list[bytes] = file.fs.cat_ranges(
            [file.path] * len(starts), list(starts), list(ends), on_error="raise", **limit
        )
        return pieces


def request_limit(client: AbstractFileSystem, num_bytes: int = 0) -> dict[str, float]:
    """The argument that ends a request that takes too long.

    Empty for clients that do not run on fsspec's event loop, which cannot be told to give up.
    """
    if not client.async_impl:
        return {}
    return {"timeout": REQUEST_TIMEOUT_S + num_bytes / SLOWEST_BYTES_PER_S}


@contextmanager
def storage_errors(path: StoragePath | str, options: Mapping[str, Any]) -> Iterator[None]:
    """Turn whatever a client raises into a StorageError that names `path` and the reason."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        # Clients raise errors of their own that share no base class.
        raise StorageError(
            f"{path}: {describe_error(error, options)}",
            is_transient=_may_pass(error),
            is_absent=isinstance(error, FileNotFoundError),
        ) from error


def describe_error(error: BaseException, options: Mapping[str, Any]) -> str:
    """One line about `error` in which no value of `options` shows."""
    text = " ".join(str(error).split())
    if isinstance(error, FileNotFoundError):
        text = "not found" if not text or "/" in text else f"not found ({text})"
    elif isinstance(error, TimeoutError) and not text:
        text = "no answer in time"
    elif isinstance(error, OSError) and error.errno is not None and error.args[1:]:
        text = " ".join(map(str, error.args[1:]))
    return without_secrets(text, options) or type(error).__name__


def _opened(scheme: str, location: str, options: Mapping[str, Any]) -> UPath:
    if scheme in _GOOGLE:
        # It cannot be imported where its package is not installed.
        from hetero_fw.checkpoint import google_storage

        google_storage.register(scheme)
    elif scheme == "webhdfs":
        from hetero_fw.checkpoint import hadoop_storage

        hadoop_storage.register(scheme)
    root: UPath = UPath(location, **options)
    _CLIENTS[root.fs._fs_token] = root.fs
    if scheme in _S3:
        root.fs.retries = NUM_ATTEMPTS
    elif scheme in _GOOGLE:
        google_storage.bound_requests(root.fs)
    return root


def _client_options(scheme: str, options: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {"use_listings_cache": False, **options}
    if scheme in _S3:
        merged["config_kwargs"] = {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            "retries": {"mode": "standard", "total_max_attempts": NUM_ATTEMPTS},
            "max_pool_connections": 32,
            **merged.get("config_kwargs", {}),
        }
    return merged


def _missing_package(scheme: str, error: ImportError) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    package = (cause.name or "").partition(".")[0]
    remedy = f"Install it: pip install {package}" if package else str(error)
    return f"{scheme}:// needs a package that is not installed. {remedy}"


def _may_pass(error: Exception) -> bool:
    kind = kind_of(error)
    # What clients do not know either, they raise as this.
    is_unknown = isinstance(error, OSError) and error.errno in (None, errno.EIO)
    return kind is StorageErrorKind.TRANSIENT or (kind is StorageErrorKind.UNKNOWN and is_unknown)
