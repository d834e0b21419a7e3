"""Operations on storage that fail for a while, or for good."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero_fw.checkpoint.retrying import retry_storage
from hetero_fw.errors import CheckpointError
from hetero_fw.policies import RetryRule
from tests.small_disk import small_disk

RULE = RetryRule(max_tries=4, first_pause_s=1.0, max_pause_s=2.0)


def failing(*errors: Exception) -> Callable[[], str]:
    """Raises these errors, one a call, then returns."""
    left = list(errors)

    def operation() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return operation


def test_what_passes_is_waited_for() -> None:
    pauses: list[float] = []
    operation = failing(OSError(errno.ESTALE, "a"), TimeoutError("b"), OSError(errno.ESTALE, "c"))
    found = retry_storage(operation, time_left_s=60.0, rule=RULE, pause=pauses.append)
    assert found == "done"
    assert len(pauses) == 3
    assert all(low <= pause <= 2 * low for low, pause in zip((0.5, 1, 1), pauses, strict=True))


def test_what_is_permanent_fails_at_once() -> None:
    error = OSError(errno.EROFS, "Read-only file system")
    with pytest.raises(CheckpointError) as caught:
        retry_storage(failing(error), time_left_s=60.0, pause=lambda pause_s: pytest.fail("waits"))
    assert str(caught.value) == "the storage is read-only: [Errno 30] Read-only file system"
    assert caught.value.__cause__ is error


def test_patience_and_time_end() -> None:
    many = [OSError(errno.ESTALE, "Stale file handle")] * 9
    with pytest.raises(CheckpointError, match=r"Stale file handle \(transient: failed 4 times"):
        retry_storage(failing(*many), time_left_s=60.0, rule=RULE, pause=lambda pause_s: None)
    with pytest.raises(CheckpointError, match=r"0\.\d s are left of 0 s after 1 tries"):
        retry_storage(failing(*many), time_left_s=0.2, rule=RULE, pause=lambda pause_s: None)


def test_a_full_disk_is_told_with_the_numbers(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2**20) as disk:

        def free_bytes() -> int:
            status = os.statvfs(disk)
            return status.f_bavail * status.f_frsize

        with pytest.raises(CheckpointError, match=r"2\.00 MiB are needed, 0 B are free in /d"):
            retry_storage(
                lambda: (disk / "x").write_bytes(bytes(2**21)),
                time_left_s=60.0,
                needed_bytes=2**21,
                free_bytes=free_bytes,
                where="/d",
            )


def test_a_storage_that_cannot_say_what_is_free() -> None:
    def free_bytes() -> int:
        raise OSError(errno.EIO, "x")

    with pytest.raises(CheckpointError, match=r"the storage is full: .*No space"):
        retry_storage(
            failing(OSError(errno.ENOSPC, "No space left on device")),
            time_left_s=60.0,
            free_bytes=free_bytes,
        )
