"""Storage that fails on request: full, read-only, broken, torn, slow or hung.

`with faulty_storage(folder) as storage:` mounts a file system at `storage.root`;
`storage.inject(FULL)` and `storage.heal()` work from any process that has `storage`.
Needs FUSE (apt: fuse3 libfuse2; pip: mfusepy) and skips with the reason where that is missing.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

MOUNT_TIMEOUT_S = 20.0
UNMOUNT_TIMEOUT_S = 10.0
CHANGES = ("create", "mkdir", "write", "truncate", "rename", "unlink", "rmdir")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with some operations.

    Attributes:
        operations: names of FUSE operations: getattr, readdir, open, create, read, write, truncate,
            flush, fsync, fsyncdir, rename, unlink, mkdir, rmdir.
        error: the errno they fail with, None if they go through in the end.
        names: pattern of the file names meant.
        after_bytes: reads and writes fail beyond this offset of the file; what lies before it is
            done.
        delay_s: how long each takes.
        hangs: they wait until the fault is gone. Nothing else ends the wait, not even SIGKILL, as
            on a hard mount of NFS.
    """

    operations: tuple[str, ...]
    error: int | None = None
    names: str = "*"
    after_bytes: int = 0
    delay_s: float = 0.0
    hangs: bool = False


FULL = Fault(operations=("write", "create", "mkdir"), error=errno.ENOSPC)
READ_ONLY = Fault(operations=CHANGES, error=errno.EROFS)


@dataclass(frozen=True, kw_only=True)
class FaultyStorage:
    """A mounted file system whose faults are in the file `faults`.

    Attributes:
        root: where it is mounted.
        disk: where its content lies, for a look past the faults.
    """

    root: Path
    disk: Path
    faults: Path

    def inject(self, *faults: Fault) -> None:
        """From now on these faults and no others. Holds for operations that begin from here on."""
        temporary = self.faults.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps([asdict(fault) for fault in faults]))
        temporary.replace(self.faults)

    def heal(self) -> None:
        """Lift all faults; what hangs goes on."""
        self.inject()


def missing_for_fuse() -> str | None:
    """What this machine lacks to mount a FUSE file system, None if nothing."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no access to /dev/fuse"
    if shutil.which("fusermount3") is None:
        return "no fusermount3 (apt-get install fuse3)"
    try:
        import mfusepy  # noqa: F401  # loads libfuse
    except (ImportError, OSError) as error:
        return f"{error} (apt-get install libfuse2, pip install mfusepy)"
    return None


@contextmanager
def faulty_storage(folder: Path) -> Iterator[FaultyStorage]:
    """Mount a healthy, empty file system below `folder`; unmounted at the end, come what may."""
    missing = missing_for_fuse()
    if missing is not None:
        pytest.skip(f"storage faults need FUSE: {missing}")
    storage = FaultyStorage(
        root=folder / "mount", disk=folder / "disk", faults=folder / "faults.json"
    )
    storage.root.mkdir()
    storage.disk.mkdir()
    storage.heal()
    log = folder / "file_system.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faulty_file_system"]
            + [str(path) for path in (storage.disk, storage.root, storage.faults)],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_mounted(storage.root, process, log)
        yield storage
    finally:
        storage.heal()
        _unmount(storage.root, process)


def _wait_until_mounted(root: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + MOUNT_TIMEOUT_S
    while not root.is_mount():
        if process.poll() is not None or time.monotonic() > deadline_s:
            pytest.fail(f"the file system was not mounted: {log.read_text()[-2000:]}")
        time.sleep(0.02)


def _unmount(root: Path, process: subprocess.Popen[bytes]) -> None:
    """Lazily, so that files which somebody still holds open do not keep it mounted."""
    command = ["fusermount3", "-u", "-z", str(root)]
    try:
        subprocess.run(command, capture_output=True, timeout=UNMOUNT_TIMEOUT_S, check=False)
        process.wait(UNMOUNT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # ends the connection: every operation under way fails
        process.wait(UNMOUNT_TIMEOUT_S)
        subprocess.run(command, capture_output=True, timeout=UNMOUNT_TIMEOUT_S, check=False)
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    assert str(root) not in mounts, f"{root} is still mounted"
