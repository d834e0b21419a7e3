"""Memory of this host, and of the container that this process may be confined to."""

from __future__ import annotations

from pathlib import Path

import psutil

from hetero_fw.policies import Measure, Reading

_CGROUP = Path("/sys/fs/cgroup")


class HostTelemetry:
    """Share of the memory in use, by the host or by the container, whichever is nearer its end.

    Args:
        with_swap: also how much of the swap space is used.
        cgroup: directory of the container's memory limits (cgroup v2, as a container sees it).
    """

    def __init__(self, *, with_swap: bool = False, cgroup: Path = _CGROUP) -> None:
        self._with_swap = with_swap
        self._cgroup = cgroup

    def read(self) -> Reading:
        """The present values; without swap space it counts as unused."""
        host = float(psutil.virtual_memory().percent)
        container = cgroup_memory_percent(self._cgroup)
        values = {Measure.HOST_MEMORY_PERCENT: max(host, container or 0.0)}
        notes = {}
        if container is not None and container > host:
            notes[Measure.HOST_MEMORY_PERCENT] = "of the container's limit"
        if self._with_swap:
            values[Measure.HOST_SWAP_PERCENT] = float(psutil.swap_memory().percent)
        return Reading(values=values, notes=notes)

    def close(self) -> None:
        """Nothing is held."""


def cgroup_memory_percent(cgroup: Path) -> float | None:
    """Memory of a cgroup that cannot be reclaimed, in percent of its limit; None without one."""
    found = _cgroup_memory(cgroup)
    if found is None:
        return None
    used_bytes, limit_bytes = found
    return 100.0 * used_bytes / limit_bytes


def available_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """What new allocations can get from the host and from the container's limit."""
    available_bytes = int(psutil.virtual_memory().available)
    found = _cgroup_memory(cgroup)
    if found is not None:
        used_bytes, limit_bytes = found
        available_bytes = min(available_bytes, max(0, limit_bytes - used_bytes))
    return available_bytes


def _cgroup_memory(cgroup: Path) -> tuple[int, int] | None:
    """Memory of a cgroup that cannot be reclaimed and its limit, in bytes; None without a limit.

    The page cache counts as use there, but unused pages of it are given back before anyone is
    killed (https://docs.kernel.org/admin-guide/cgroup-v2.html, `memory.stat`).
    """
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used_bytes = int((cgroup / "memory.current").read_text())
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    if not limit.isdigit() or int(limit) == 0:
        return None
    cache_bytes = next((int(s.split()[1]) for s in lines if s.startswith("inactive_file ")), 0)
    return max(0, used_bytes - cache_bytes), int(limit)
