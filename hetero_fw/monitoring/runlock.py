"""One supervisor for each run directory."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from hetero_fw.errors import ConfigError

_log = logging.getLogger(__name__)


class RunLock:
    """Exclusive lock on a run directory, held until `release` or the end of the process.

    The kernel drops it when the process dies, however it dies. A child made by a bare fork (no
    exec) would share it; processes started by forkserver or spawn do not.

    Attributes:
        is_exclusive: False on a file system without file locks; then nothing keeps a second
            supervisor out, and a warning says so.

    Raises:
        ConfigError: another live process holds the lock; names its pid.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self.is_exclusive = self._acquire()
        except BaseException:
            self._close()
            raise

    def _acquire(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 64, 0).decode(errors="replace").strip()
            who = f"process {holder}" if holder else "another process"
            raise ConfigError(
                f"The run directory {self.path.parent} is in use by {who}. Wait until it ends, "
                f"stop it, or start this run under another name with run_name=NAME."
            ) from None
        except OSError as error:
            _log.warning(
                "%s: this file system has no file locks (%s); do not start the same run twice.",
                self.path,
                error.strerror,
            )
            return False
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        return True

    def release(self) -> None:
        """Let go of the lock. Harmless when called twice."""
        if self._descriptor >= 0 and self.is_exclusive:
            os.ftruncate(self._descriptor, 0)
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
