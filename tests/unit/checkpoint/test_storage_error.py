"""What errors of storage are taken for: real ones, and those that clients of servers raise."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_fw.checkpoint.storage_error import StorageFailure, classify, lacks_room
from hetero_fw.errors import CheckpointError
from hetero_fw.policies import StorageErrorKind as Kind
from tests.small_disk import read_only_view, small_disk

MIB = 2**20


def error_of(call: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:  # which one is what is looked at
        call()
    return caught.value


def write(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        rest = memoryview(bytes(4 * MIB))
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def torch_save(path: Path) -> None:
    torch.save({"x": torch.zeros(MIB)}, path)


@pytest.mark.parametrize("save", [write, torch_save])
def test_a_disk_that_is_really_full(tmp_path: Path, save: Callable[[Path], None]) -> None:
    with small_disk(tmp_path / "disk", MIB) as disk:
        error = error_of(lambda: save(disk / "x"))
        found = classify(error, needed_bytes=4 * MIB, free_bytes=MIB, where=str(disk))
    assert found.kind is Kind.FULL, repr(error)
    assert found.is_permanent
    assert "full, 4.00 MiB are needed, 1.00 MiB are free in" in found.text
    assert str(disk) in found.text


@pytest.fixture
def size_limit() -> Iterator[None]:
    """Files of at most 1 MiB, with an error instead of the signal that would kill."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("size_limit")
@pytest.mark.parametrize("save", [write, torch_save])
def test_a_file_that_may_not_grow(tmp_path: Path, save: Callable[[Path], None]) -> None:
    assert classify(error_of(lambda: save(tmp_path / "x"))).kind is Kind.FULL


@pytest.mark.parametrize("save", [write, torch_save])
def test_storage_that_is_really_read_only(tmp_path: Path, save: Callable[[Path], None]) -> None:
    with read_only_view(tmp_path / "view", tmp_path) as view:
        found = classify(error_of(lambda: save(view / "x")))
    assert found.kind is Kind.READ_ONLY
    assert found.is_permanent
    assert "read-only" in found.text


def test_a_directory_that_is_gone_and_one_in_the_way(tmp_path: Path) -> None:
    assert classify(error_of(lambda: write(tmp_path / "gone" / "x"))).kind is Kind.MISSING
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    assert classify(error_of((tmp_path / "full").rmdir)).kind is Kind.EXISTS
    assert classify(error_of((tmp_path / "full").mkdir)).kind is Kind.EXISTS


def test_a_server_that_is_not_there(free_port: int) -> None:
    def connect() -> None:
        socket.create_connection(("127.0.0.1", free_port), timeout=1.0)

    found = classify(error_of(connect))
    assert found.kind is Kind.TRANSIENT
    assert not found.is_permanent


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EDQUOT, Kind.FULL),
        (errno.EFBIG, Kind.FULL),
        (errno.EACCES, Kind.DENIED),
        (errno.EPERM, Kind.DENIED),
        (errno.EIO, Kind.UNKNOWN),
        (errno.ESTALE, Kind.TRANSIENT),
        (errno.ETIMEDOUT, Kind.TRANSIENT),
        (errno.ENOTCONN, Kind.TRANSIENT),
        (errno.EINVAL, Kind.UNKNOWN),
    ],
)
def test_error_numbers(code: int, kind: Kind) -> None:
    error = OSError(code, os.strerror(code))
    assert classify(error).kind is kind
    # As another rank or another process tells it: in words.
    assert classify(CheckpointError(f"rank 1: {error}")).kind is kind
    assert str(error) in classify(error).text


class ClientError(Exception):
    """Looks like botocore's, which is not needed to tell what its errors mean."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(f"An error occurred ({code}) when calling the PutObject operation: no")
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


CODES = [
    ("QuotaExceeded", 403, Kind.FULL),
    ("InsufficientStorage", 507, Kind.FULL),
    ("XMinioStorageFull", 507, Kind.FULL),
    ("Odd", 507, Kind.FULL),
    ("507", 507, Kind.FULL),
    ("EntityTooLarge", 400, Kind.FULL),
    ("AccessDenied", 403, Kind.DENIED),
    ("ExpiredToken", 400, Kind.DENIED),
    ("RequestTimeTooSkewed", 403, Kind.DENIED),
    ("NoSuchBucket", 404, Kind.MISSING),
    ("404", 404, Kind.MISSING),
    ("PreconditionFailed", 412, Kind.EXISTS),
    ("SlowDown", 503, Kind.TRANSIENT),
    ("ServiceUnavailable", 503, Kind.TRANSIENT),
    ("InternalError", 500, Kind.TRANSIENT),
    ("Odd", 502, Kind.TRANSIENT),
    ("RequestTimeout", 400, Kind.TRANSIENT),
    ("BadDigest", 400, Kind.TRANSIENT),
    ("NoSuchUpload", 404, Kind.TRANSIENT),
    ("InvalidArgument", 400, Kind.UNKNOWN),
]


@pytest.mark.parametrize(("code", "status", "kind"), CODES)
def test_codes_of_object_stores(code: str, status: int, kind: Kind) -> None:
    error = ClientError(code, status)
    assert classify(error).kind is kind
    if code.isalpha() and code != "Odd":
        assert classify(OSError(errno.EINVAL, str(error))).kind is kind  # unpickled: cause lost


@pytest.mark.parametrize(("code", "status", "kind"), CODES)
def test_codes_behind_the_errors_that_s3fs_makes_of_them(
    code: str, status: int, kind: Kind
) -> None:
    translate = pytest.importorskip("s3fs.errors", reason="s3fs is an extra").translate_boto_error
    translated = translate(ClientError(code, status))
    assert isinstance(translated, OSError)
    if code != "InvalidArgument":
        assert classify(translated).kind is kind


def raised_from(outer: BaseException, inner: BaseException) -> BaseException:
    outer.__cause__ = inner
    return outer


def raised_while_handling(outer: BaseException, inner: BaseException) -> BaseException:
    outer.__context__ = inner
    return outer


FULL = OSError(errno.ENOSPC, "No space left on device")
STALE = OSError(errno.ESTALE, "Stale file handle")
TORN = RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (raised_from(RuntimeError("save failed"), FULL), Kind.FULL),
        (raised_from(raised_from(OSError(errno.EIO, "x"), ValueError("y")), FULL), Kind.FULL),
        (raised_from(OSError(errno.EIO, "unknown code"), ClientError("Odd", 507)), Kind.FULL),
        (raised_while_handling(RuntimeError("save failed"), FULL), Kind.FULL),
        (TORN, Kind.FULL),
        (raised_while_handling(RuntimeError(*TORN.args), STALE), Kind.TRANSIENT),
        # Looking for a file that need not be there says nothing about what came next.
        (
            raised_while_handling(OSError(errno.ESTALE, "x"), FileNotFoundError(errno.ENOENT, "y")),
            Kind.TRANSIENT,
        ),
        (ExceptionGroup("several", [FULL, ValueError("x")]), Kind.FULL),
        (RuntimeError("write: No space left on device"), Kind.FULL),
        (TimeoutError(), Kind.TRANSIENT),
        (TimeoutError("upload took over 60 s"), Kind.TRANSIENT),
        (ConnectionResetError("peer"), Kind.TRANSIENT),
        (socket.gaierror(-3, "Temporary failure in name resolution"), Kind.TRANSIENT),
        (PermissionError("Access Denied"), Kind.DENIED),
        (type("ReadTimeoutError", (Exception,), {})("x"), Kind.TRANSIENT),
        (type("EndpointConnectionError", (Exception,), {})("x"), Kind.TRANSIENT),
        (type("NoCredentialsError", (Exception,), {})("x"), Kind.DENIED),
        (type("HttpError", (Exception,), {"code": 503})("x"), Kind.TRANSIENT),
        (type("HttpError", (Exception,), {"status": 403})("x"), Kind.DENIED),
        (OSError("Forbidden: https://host/b/bucket/o\nno access"), Kind.DENIED),
        (type("DefaultCredentialsError", (Exception,), {})("x"), Kind.DENIED),
        (type("RefreshError", (Exception,), {})("invalid_grant"), Kind.DENIED),
        (
            raised_from(
                type("RefreshError", (Exception,), {})("x"),
                type("TransportError", (Exception,), {})("y"),
            ),
            Kind.TRANSIENT,
        ),
        (type("ChecksumError", (Exception,), {})("md5"), Kind.TRANSIENT),
        (type("Judged", (Exception,), {"is_transient": True})("odd"), Kind.TRANSIENT),
        (type("Judged", (Exception,), {"is_absent": True})("odd"), Kind.MISSING),
        (ValueError("a bug"), Kind.UNKNOWN),
        (KeyError("x"), Kind.UNKNOWN),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_errors_in_disguise(error: BaseException, kind: Kind) -> None:
    assert classify(error).kind is kind


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert classify(first).kind is Kind.UNKNOWN
    first.__cause__ = second.__cause__ = None
    first.__context__, second.__context__ = second, first
    assert classify(first).kind is Kind.UNKNOWN


def test_the_text_keeps_the_words_of_the_storage() -> None:
    wrapped: Any = raised_from(CheckpointError("shard-00001.bin was not written"), FULL)
    found = classify(wrapped)
    assert found == StorageFailure(
        kind=Kind.FULL,
        text="the storage is full: shard-00001.bin was not written "
        "([Errno 28] No space left on device)",
    )
    assert classify(ValueError()).text == "writing failed: ValueError()"
    assert "are needed" not in classify(STALE, needed_bytes=1, free_bytes=1).text


@pytest.mark.parametrize(
    ("error", "helps"),
    [
        (FULL, True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (OSError(errno.EFBIG, os.strerror(errno.EFBIG)), False),
        (ClientError("EntityTooLarge", 400), False),
        (OSError(errno.EROFS, "Read-only file system"), False),
    ],
    ids=repr,
)
def test_deleting_something_helps_where_all_together_is_too_much(
    error: Exception, helps: bool
) -> None:
    assert lacks_room(f"rank 1: {classify(error, needed_bytes=5, free_bytes=3).text}") is helps


def test_a_full_storage_with_room_is_no_contradiction() -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def text(free_bytes: int | None) -> str:
        return classify(error, needed_bytes=2**20, free_bytes=free_bytes, where="/d").text

    assert text(2**30) == (
        "the storage is full by its own account, though 1.00 GiB are free in /d and 1.00 MiB are "
        "needed (a quota, a lack of inodes, or room that was made only since): "
        "[Errno 28] No space left on device"
    )
    assert classify(CheckpointError(text(2**30).partition("[Errno")[0])).kind is Kind.FULL
    full = "the storage is full, 1.00 MiB are needed"
    assert text(2**20 - 1) == f"{full}, 1024.00 KiB are free in /d: {error}"
    assert text(None) == f"{full}: {error}"
