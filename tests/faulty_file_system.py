"""A directory seen through a FUSE file system that fails on request; run as a process of its own.

    python -m tests.faulty_file_system DISK MOUNT FAULTS

What is done below MOUNT happens in DISK, unless a fault of the JSON file FAULTS (see
`tests.storage_faults.Fault`) says otherwise. Each operation looks at that file anew.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mfusepy import FUSE, FuseOSError, Operations

PAUSE_S = 0.02
_PR_SET_PDEATHSIG = 1


class FaultyFileSystem(Operations):
    """Passes everything on to `disk`. Open files are named by their descriptors there."""

    use_ns = True  # times are nanoseconds

    def __init__(self, disk: Path, faults: Path) -> None:
        self._disk = disk
        self._faults = faults
        self._parent = os.getppid()

    def _at(self, path: str) -> Path:
        return self._disk / path.lstrip("/")

    def _matching(self, operation: str, path: str, end: int) -> Iterator[dict[str, Any]]:
        """Faults of `operation` on `path` that reaches up to the byte `end` of the file."""
        for fault in json.loads(self._faults.read_text()):
            is_meant = operation in fault["operations"] and fnmatch(Path(path).name, fault["names"])
            if is_meant and end > fault["after_bytes"]:
                yield fault

    def _meet(self, operation: str, path: str, end: int = sys.maxsize) -> None:
        """Fail, wait or hang as the faults say; hanging ends with the fault that causes it."""
        for fault in self._matching(operation, path, end):
            time.sleep(fault["delay_s"])
            if fault["error"] is not None:
                raise FuseOSError(fault["error"])
            while fault["hangs"] and fault in self._matching(operation, path, end):
                if os.getppid() != self._parent:
                    os._exit(1)  # nobody is left to lift the fault
                time.sleep(PAUSE_S)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        self._meet("getattr", path)
        found = os.fstat(fh) if fh is not None else self._at(path).lstat()
        names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino", "st_blocks")
        times = ("st_atime", "st_mtime", "st_ctime")
        return {
            **{name: getattr(found, name) for name in names},
            **{name: getattr(found, f"{name}_ns") for name in times},
        }

    def readdir(self, path: str, fh: int) -> list[str]:
        self._meet("readdir", path)
        return [".", "..", *(entry.name for entry in self._at(path).iterdir())]

    def open(self, path: str, flags: int) -> int:
        self._meet("open", path)
        return os.open(self._at(path), flags & ~os.O_APPEND)  # the kernel says where to write

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self._meet("create", path)
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._meet("read", path, offset + size)
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        end = offset + len(data)
        for fault in self._matching("write", path, end):
            # What lies before the limit reaches the disk: the file is torn there, not absent.
            os.pwrite(fh, data[: max(0, fault["after_bytes"] - offset)], offset)
        self._meet("write", path, end)
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        self._meet("truncate", path)
        os.truncate(fh if fh is not None else self._at(path), length)

    def flush(self, path: str, fh: int) -> None:
        self._meet("flush", path)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        self._meet("fsync", path)
        os.fsync(fh)

    def fsyncdir(self, path: str, datasync: int, fh: int) -> None:
        self._meet("fsyncdir", path)
        descriptor = os.open(self._at(path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def rename(self, old: str, new: str) -> None:
        self._meet("rename", old)
        self._at(old).rename(self._at(new))

    def unlink(self, path: str) -> None:
        self._meet("unlink", path)
        self._at(path).unlink()

    def mkdir(self, path: str, mode: int) -> None:
        self._meet("mkdir", path)
        self._at(path).mkdir(mode)

    def rmdir(self, path: str) -> None:
        self._meet("rmdir", path)
        self._at(path).rmdir()

    def chmod(self, path: str, mode: int) -> None:
        self._at(path).chmod(mode)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        os.utime(self._at(path), ns=times)

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._at(path))
        names = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_files", "f_ffree", "f_frsize")
        return {name: getattr(found, name) for name in (*names, "f_namemax")}


def main() -> None:
    """Serve until unmounted, ended, or left alone by the process that started this one."""
    disk, mount, faults = map(Path, sys.argv[1:])
    # libfuse unmounts on SIGTERM.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    # Threads, so that an operation that hangs holds up no other one. Files that are unlinked while
    # they are open go at once, so that their directory can go too.
    FUSE(
        FaultyFileSystem(disk, faults),
        str(mount),
        foreground=True,
        nothreads=False,
        big_writes=True,
        hard_remove=True,
    )


if __name__ == "__main__":
    main()
