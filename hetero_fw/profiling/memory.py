"""Memory a rank holds, and a hard budget that stands in for an absent device's memory."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import psutil

# Of torch's CPU allocator, of C++ libraries under torch, and of the CUDA runtime.
_OUT_OF_MEMORY_SIGNS = ("can't allocate memory", "std::bad_alloc", "CUDA error: out of memory")


class MemoryMeter:
    """Reads the memory of this process; cheap enough for every step."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._base_bytes = int(self._process.memory_info().rss)

    def used_bytes(self) -> int:
        """Resident memory gained since the meter was made, in bytes."""
        return max(0, int(self._process.memory_info().rss) - self._base_bytes)


def limit_memory(budget_bytes: int) -> None:
    """Let this process allocate at most `budget_bytes` more than it holds now.

    Past it torch's CPU allocator raises a RuntimeError, the nearest thing a CPU process has to
    an out-of-memory error of a device. The limit counts private writable memory (RLIMIT_DATA);
    address space that libraries only reserve is not charged.
    """
    soft_bytes = _data_bytes() + budget_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        soft_bytes = min(soft_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft_bytes, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that a device or an emulated device ran out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = str(error)
    return any(sign in text for sign in _OUT_OF_MEMORY_SIGNS)


def _data_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0
