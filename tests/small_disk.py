"""File systems of a chosen size or mood, mounted for a test; root only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MOUNT_TIMEOUT_S = 10.0


@contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[Path]:
    """A tmpfs of `num_bytes` at the new directory `path`."""
    path.mkdir()
    with _mounted(path, "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs"):
        yield path


@contextmanager
def read_only_view(path: Path, of: Path) -> Iterator[Path]:
    """The directory `of`, seen read-only at the new directory `path`."""
    path.mkdir()
    with _mounted(path, "--bind", str(of)):
        _mount("-o", "remount,bind,ro", str(path))
        yield path


@contextmanager
def _mounted(path: Path, *arguments: str) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    _mount(*arguments, str(path))
    try:
        yield
    finally:
        # Lazily: whatever still has a file open there does not keep it mounted.
        subprocess.run(["umount", "-l", path], timeout=MOUNT_TIMEOUT_S, check=True)


def _mount(*arguments: str) -> None:
    done = subprocess.run(
        ["mount", *arguments], capture_output=True, text=True, timeout=MOUNT_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
