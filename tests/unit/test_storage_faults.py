"""The faults that tests inject into storage are those that programs see."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage_faults import FULL, READ_ONLY, Fault, FaultyStorage, faulty_storage


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[FaultyStorage]:
    with faulty_storage(tmp_path) as mounted:
        yield mounted


def write_and_sync(path: Path, content: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]  # an error in the middle is told by the next call
        os.fsync(file.fileno())


def fails_with(code: int, path: Path, content: bytes) -> bool:
    with pytest.raises(OSError) as caught:
        write_and_sync(path, content)
    return caught.value.errno == code


def test_healthy_storage_is_a_plain_file_system(storage: FaultyStorage) -> None:
    content = os.urandom(3_000_001)
    folder = storage.root / "a"
    folder.mkdir()
    write_and_sync(folder / "x", content)
    (folder / "x").rename(folder / "y")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)
    assert (folder / "y").read_bytes() == content == (storage.disk / "a" / "y").read_bytes()
    with pytest.raises(OSError, match="not empty"):
        folder.rmdir()
    with (folder / "y").open("ab") as file:
        file.write(b"more")
    assert (folder / "y").stat().st_size == len(content) + 4
    with pytest.raises(FileExistsError):
        (folder / "y").open("xb")
    (folder / "y").unlink()
    folder.rmdir()
    assert not list(storage.root.iterdir())
    assert os.statvfs(storage.root).f_blocks == os.statvfs(storage.disk).f_blocks


def test_errors_come_and_go(storage: FaultyStorage) -> None:
    path = storage.root / "x"
    path.touch()
    storage.inject(FULL)
    assert fails_with(errno.ENOSPC, path, b"1")
    storage.inject(READ_ONLY)
    assert fails_with(errno.EROFS, path, b"1")
    storage.inject(Fault(operations=("fsync",), error=errno.EIO, names="x"))
    assert fails_with(errno.EIO, path, b"2")
    write_and_sync(storage.root / "y", b"other names are not meant")
    storage.heal()
    write_and_sync(path, b"3")
    assert path.read_bytes() == b"3"


def test_a_torn_file_keeps_what_lies_before_the_tear(storage: FaultyStorage) -> None:
    storage.inject(Fault(operations=("write",), error=errno.EIO, after_bytes=200_000))
    content = os.urandom(400_000)
    assert fails_with(errno.EIO, storage.root / "x", content)
    assert (storage.disk / "x").read_bytes() == content[:200_000]


def test_what_hangs_goes_on_when_the_fault_is_lifted(storage: FaultyStorage) -> None:
    storage.inject(Fault(operations=("fsync",), hangs=True))
    thread = threading.Thread(target=write_and_sync, args=(storage.root / "x", b"1"), daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert (storage.disk / "x").read_bytes() == b"1"
    write_began_s = time.monotonic()
    (storage.root / "y").write_bytes(b"2")  # others are served meanwhile
    assert time.monotonic() - write_began_s < 2.0
    storage.heal()
    thread.join(10.0)
    assert not thread.is_alive()


def test_slow_storage(storage: FaultyStorage) -> None:
    storage.inject(Fault(operations=("fsync",), delay_s=0.3))
    began_s = time.monotonic()
    write_and_sync(storage.root / "x", b"1")
    assert 0.3 <= time.monotonic() - began_s < 5.0


def test_a_process_that_hangs_in_it_ends_only_with_the_fault(storage: FaultyStorage) -> None:
    storage.inject(Fault(operations=("fsync",), hangs=True))
    program = "import os, sys; f = open(sys.argv[1], 'wb', 0); f.write(b'1'); os.fsync(f.fileno())"
    process = subprocess.Popen([sys.executable, "-c", program, str(storage.root / "x")])
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.kill()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    storage.heal()
    assert process.wait(5.0) == -signal.SIGKILL
