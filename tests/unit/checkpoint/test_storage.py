"""URLs, their clients, and what is told when one of them fails."""

from __future__ import annotations

import errno
import functools
import pickle
import uuid
from pathlib import Path
from typing import Any

import pytest
from fsspec.spec import AbstractBufferedFile
from upath import UPath

from hetero_fw.checkpoint import (
    StorageError,
    StoragePath,
    is_object_store,
    open_root,
    scheme_of,
)
from hetero_fw.checkpoint.hashing import HashAlgorithm, hexdigest
from hetero_fw.checkpoint.object_store import ObjectStore
from hetero_fw.checkpoint.shard_file import FileHash
from hetero_fw.checkpoint.storage import describe_error, read_bytes, storage_errors
from hetero_fw.errors import ConfigError


@pytest.mark.parametrize("location", ["/data/run", "file:///data/run", "local:///data/run"])
def test_a_path_is_a_directory_of_the_operating_system(location: str) -> None:
    root = open_root(location)
    assert root == Path("/data/run")
    assert not is_object_store(root)
    assert scheme_of(location) == ""


def test_a_relative_path_does_not_depend_on_who_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    assert open_root("runs") == Path("/tmp/runs")
    assert open_root("~/runs") == Path.home() / "runs"


def test_a_url_is_a_remote_storage_that_lists_afresh() -> None:
    root = open_root("memory://bucket/runs/mine/")
    assert is_object_store(root)
    assert str(root) == "memory://bucket/runs/mine"
    assert root.storage_options["use_listings_cache"] is False


def test_time_outs_and_retries_of_s3_are_bounded_and_can_be_changed() -> None:
    root = open_root("s3://bucket/run", {"config_kwargs": {"read_timeout": 7}, "key": "a-key"})
    assert is_object_store(root)
    config = root.fs.config_kwargs
    assert (config["connect_timeout"], config["read_timeout"]) == (5, 7)
    assert config["retries"]["total_max_attempts"] * root.fs.retries <= 4
    assert "a-key" not in f"{root} {root!r} {root / 'x'!r}"


@pytest.mark.usefixtures("_no_gcsfs")
@pytest.mark.parametrize(
    ("location", "package"),
    [("gs://bucket/run", "gcsfs"), ("abfs://bucket/run", "adlfs"), ("hdfs://host/run", "pyarrow")],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, location: str, package: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ConfigError, match=f"pip install {package}$"):
        open_root(location)


def test_what_a_client_refuses_is_one_line_without_the_values() -> None:
    with pytest.raises(ConfigError, match="its client cannot be set up") as caught:
        open_root("s3://bucket/run", {"secret": "hunter22", "password": "other-secret"})
    assert "hunter22" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"s33:// is no storage.*Did you mean 's3'"):
        open_root("s33://bucket/run")


def raised(error: Exception, options: dict[str, Any] | None = None) -> StorageError:
    with (
        pytest.raises(StorageError) as caught,
        storage_errors("s3://bucket/key", options or {}),
    ):
        raise error
    return caught.value


class HTTPClientError(Exception):
    """Like the one of botocore."""


class HttpError(Exception):
    """Like the one of gcsfs."""

    def __init__(self, code: int) -> None:
        super().__init__(f"status {code}")
        self.code = code


@pytest.mark.parametrize(
    ("error", "reason", "is_transient"),
    [
        (FileNotFoundError("bucket/key"), "not found", False),
        (FileNotFoundError("The bucket is not there"), "not found (The bucket is not", False),
        (PermissionError("Forbidden"), "Forbidden", False),
        (FileExistsError(), "FileExistsError", False),
        (TimeoutError(), "no answer in time", True),
        (OSError(errno.EBUSY, "Slow Down"), "Slow Down", True),
        (OSError(errno.EIO, "disk"), "disk", True),
        (OSError(errno.ENOSPC, "full"), "full", False),
        (OSError(errno.EINVAL, "bad"), "bad", False),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "reset", True),
        (HTTPClientError("An HTTP Client\nfailed"), "An HTTP Client failed", True),
        (HttpError(503), "status 503", True),
        (HttpError(403), "status 403", False),
        (ValueError("no"), "no", False),
    ],
)
def test_errors_of_clients_become_one_kind(
    error: Exception, reason: str, is_transient: bool
) -> None:
    told = raised(error)
    assert str(told).startswith(f"s3://bucket/key: {reason}")
    assert len(str(told).splitlines()) == 1
    assert told.is_transient is is_transient
    assert told.is_absent is isinstance(error, FileNotFoundError)
    again = pickle.loads(pickle.dumps(told))
    assert (str(again), again.is_transient) == (str(told), is_transient)


def test_values_of_options_do_not_show_in_errors() -> None:
    options = {
        "key": "my-key-id",
        "client_kwargs": {"aws_session_token": "my-token", "more": ["in-a-list"]},
        "endpoint_url": "http://host:9000",
        "anon": False,
        "retries": 5,
    }
    text = "my-key-id, my-token and in-a-list at http://host:9000 after 5 False"
    assert (
        describe_error(OSError(text), options)
        == "***, *** and *** at http://host:9000 after 5 False"
    )
    hidden = {"endpoint_url": "http://me:pw@host:9000"}
    assert describe_error(OSError("http://me:pw@host:9000 is away"), hidden) == "*** is away"


def hash_file(path: StoragePath, algorithm: HashAlgorithm) -> tuple[int, str]:
    """Size and hash."""
    found = FileHash(path, algorithm)
    assert found.read_on()
    return found.size, found.hexdigest()


@pytest.mark.parametrize("algorithm", HashAlgorithm)
def test_reading(tmp_path: Path, algorithm: HashAlgorithm) -> None:
    root = open_root(f"memory://{uuid.uuid4().hex}")
    assert is_object_store(root)
    content = bytes(range(256)) * 100_000
    (root / "big").write_bytes(content)
    (tmp_path / "big").write_bytes(content)
    assert hash_file(root / "big", algorithm) == hash_file(tmp_path / "big", algorithm)
    assert hash_file(root / "big", algorithm) == (len(content), hexdigest(algorithm, content))
    assert read_bytes(root / "big") == content
    (root / "empty").write_bytes(b"")
    (tmp_path / "empty").write_bytes(b"")
    assert hash_file(root / "empty", algorithm) == hash_file(tmp_path / "empty", algorithm)
    for read in (functools.partial(hash_file, algorithm=algorithm), read_bytes):
        with pytest.raises(StorageError, match="absent: not found"):
            read(root / "absent")


def test_objects_of_one_folder() -> None:
    root = open_root(f"memory://{uuid.uuid4().hex}/run")
    assert is_object_store(root)
    store = ObjectStore(root)
    assert store.list() == {}
    store.put("a/one", b"1")
    store.put("a/two", b"22")
    store.put("ab/three", b"333")
    assert {key: item.size for key, item in store.list("a").items()} == {"a/one": 1, "a/two": 2}
    assert len(store.list()) == 3
    store.delete(["a/one", "a/gone"])
    store.delete(["a/gone"])
    assert set(store.list()) == {"a/two", "ab/three"}
    store.put_new("new", b"mine")
    with pytest.raises(StorageError, match="somebody else's is there"):
        store.put_new("new", b"theirs")
    assert store.read("new") == b"mine"


def test_a_directory_that_cannot_be_listed_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = UPath(f"file://{tmp_path}/run")
    store = ObjectStore(root)
    store.put("a/one", b"1")
    inner = type(root.fs).ls

    def ls(client: Any, path: str, **options: Any) -> Any:
        if path.endswith("/a"):
            raise error
        return inner(client, path, **options)

    monkeypatch.setattr(type(root.fs), "ls", ls)
    error: OSError = ConnectionError("away")
    with pytest.raises(StorageError, match="away") as caught:
        store.list()
    assert caught.value.is_transient
    error = FileNotFoundError("deleted meanwhile")
    assert store.list() == {}


def test_an_upload_that_breaks_off_is_not_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was buffered is not sent by closing the file."""
    root = UPath(f"file://{tmp_path}/run")
    store = ObjectStore(root)
    flushed: list[bool] = []

    class Buffered(AbstractBufferedFile):
        def _initiate_upload(self) -> None: ...

        def _upload_chunk(self, final: bool = False) -> bool:
            flushed.append(final)
            return True

    def breaking(piece: memoryview) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(root.fs, "open", lambda path, mode, **_: Buffered(root.fs, path, mode))
    with pytest.raises(StorageError, match="broken"):
        store.upload("a/b", memoryview(b"content"), breaking)
    assert True not in flushed
    store.upload("a/b", memoryview(b"content"), lambda piece: None)
    assert flushed == [True]


def test_a_storage_that_has_directories(tmp_path: Path) -> None:
    """As those of HDFS; the client is that of the local file system."""
    store = ObjectStore(UPath(f"file://{tmp_path}/run"))
    assert store.list() == {}
    content = memoryview(bytes(range(256)) * 200_000)
    pieces: list[int] = []
    store.upload("version/shard", content, lambda piece: pieces.append(piece.nbytes))
    assert (len(pieces), sum(pieces)) == (4, content.nbytes)
    assert store.read("version/shard") == content
    store.put("version/manifest.json", b"{}")
    store.put_new(".attempts/0.json", b"mine")
    with pytest.raises(StorageError, match="somebody else's is there"):
        store.put_new(".attempts/0.json", b"theirs")
    assert set(store.list()) == {".attempts/0.json", "version/manifest.json", "version/shard"}
    store.remove_folder("version")
    assert set(store.list("version")) == {"version/manifest.json", "version/shard"}
    store.delete(["version/manifest.json", "version/shard"])
    store.remove_folder("version")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".attempts"]
    store.abort_uploads(lambda key: True)
