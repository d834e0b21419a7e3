"""Whether the places of checkpoints, and host memory, can hold what saving needs.

A place must hold three checkpoints: the last two stay until a newer one is complete, because the
newest can turn out to be unreadable. What a run keeps besides, it can do without. Host memory must
hold a copy of the state of the ranks of this host, and whatever lies in a file system that is
memory itself, such as /dev/shm.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero_fw.checkpoint.directories import step_of
from hetero_fw.monitoring import format_bytes
from hetero_fw.policies import MIN_KEPT

# Those that retention keeps whatever happens, and the one that is being written.
NUM_CHECKPOINTS = MIN_KEPT + 1

_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_MOUNTS = Path("/proc/self/mounts")
_REMEDY = (
    "save weights only (ckpt.save_optimizer_states=false), or train without checkpoints (ckpt=none)"
)


@dataclass(frozen=True, kw_only=True)
class Volume:
    """What is known of the file system that a directory of checkpoints is on, or will be.

    Attributes:
        device: the same for all directories that share the space.
        free_bytes: for this user; what unfinished saves of the past hold counts as free, because
            the next attempt removes them.
        held_bytes: in checkpoints that are there.
        is_memory: its files are host memory.
    """

    path: Path
    device: int
    free_bytes: int
    held_bytes: int
    is_memory: bool


@dataclass(frozen=True, kw_only=True)
class SpaceDemand:
    """Checkpoints of `checkpoint_bytes` are to be kept on `volume`, which `key` has named.

    Attributes:
        keep_latest_k: newest ones to keep if there is room; `num_besides` others are kept as well.
        gives_way: for a save that finds no room there an old one of more than two is deleted.
    """

    key: str
    checkpoint_bytes: int
    volume: Volume
    keep_latest_k: int = MIN_KEPT
    num_besides: int = 0
    gives_way: bool = False

    @property
    def more_bytes(self) -> int:
        """What must be free. Also where old checkpoints are, unless they give way."""
        held_bytes = self.volume.held_bytes
        if self.gives_way and held_bytes >= NUM_CHECKPOINTS * self.checkpoint_bytes:
            return 0
        return self._more_bytes(NUM_CHECKPOINTS)

    @property
    def wanted_bytes(self) -> int:
        """What must be free to keep all that is to be kept."""
        return self._more_bytes(self.keep_latest_k + self.num_besides + 1)

    def fitting_k(self, free_bytes: int) -> int | None:
        """The largest `keep_latest_k` with which `free_bytes` are enough; None: not even 2."""
        room_bytes = free_bytes + self.volume.held_bytes
        num_fitting = room_bytes // max(1, self.checkpoint_bytes) - 1 - self.num_besides
        return num_fitting if num_fitting >= MIN_KEPT else None

    def _more_bytes(self, num_checkpoints: int) -> int:
        total_bytes = num_checkpoints * self.checkpoint_bytes
        return max(self.checkpoint_bytes, total_bytes - self.volume.held_bytes)


def survey(path: Path, prefix: str) -> Volume:
    """Look at the file system of the directory `path`, which need not exist yet.

    Raises:
        OSError: it cannot be looked at.
    """
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    status = os.statvfs(existing)
    held = [entry for entry in _entries(path) if step_of(entry.name, prefix) is not None]
    unfinished = [entry for entry in _entries(path) if entry.name.startswith(".")]
    return Volume(
        path=path,
        device=existing.stat().st_dev,
        free_bytes=status.f_bavail * status.f_frsize + sum(map(_size_of, unfinished)),
        held_bytes=sum(map(_size_of, held)),
        is_memory=_file_system_of(existing) in _MEMORY_FILE_SYSTEMS,
    )


def shortfalls(
    demands: Sequence[SpaceDemand], *, staging_bytes: int, available_memory_bytes: int
) -> list[str]:
    """One sentence or more for each place that is too small, and for host memory if it is.

    Args:
        demands: everything that checkpoints need on the file systems of this host.
        staging_bytes: for the copies of the state of the ranks of this host.
        available_memory_bytes: what new allocations can get.
    """
    return [
        *_volume_problems(_by_device(demands)),
        *_memory_problems(demands, staging_bytes, available_memory_bytes),
    ]


def tight_places(demands: Sequence[SpaceDemand]) -> list[str]:
    """A sentence for each place that holds what is needed and not all that is to be kept."""
    return [
        _tightness(demand, free_bytes - sum(d.more_bytes for d in group if d is not demand))
        for group in _by_device(demands)
        if sum(demand.wanted_bytes for demand in group) > (free_bytes := group[0].volume.free_bytes)
        for demand in group
        if demand.wanted_bytes > demand.more_bytes
    ]


def _tightness(demand: SpaceDemand, free_bytes: int) -> str:
    besides = f", with {demand.num_besides} best ones besides," if demand.num_besides else ""
    fitting_k = demand.fitting_k(free_bytes)
    fits = f"{fitting_k} is the most that fits" if fitting_k else "not even 2 fit"
    return (
        f"ckpt.keep_latest_k={demand.keep_latest_k}{besides} takes "
        f"{format_bytes(demand.wanted_bytes)} on {demand.volume.path} while one more is written; "
        f"{format_bytes(free_bytes)} are free there, and {fits}. Where a save "
        "finds no room an older one goes, and then fewer are kept."
    )


def _by_device(demands: Sequence[SpaceDemand]) -> list[list[SpaceDemand]]:
    by_device: dict[int, list[SpaceDemand]] = {}
    for demand in demands:
        by_device.setdefault(demand.volume.device, []).append(demand)
    return list(by_device.values())


def _volume_problems(groups: Iterable[Sequence[SpaceDemand]]) -> Iterator[str]:
    for demands in groups:
        free_bytes = demands[0].volume.free_bytes
        if sum(demand.more_bytes for demand in demands) <= free_bytes:
            continue
        needs = " and ".join(_need(demand) for demand in demands)
        keys = ", ".join(dict.fromkeys(demand.key for demand in demands))
        yield (
            f"ckpt: {needs}; {format_bytes(free_bytes)} are free there. Free some, choose another "
            f"place ({keys}), {_REMEDY}."
        )


def _need(demand: SpaceDemand) -> str:
    total_bytes = NUM_CHECKPOINTS * demand.checkpoint_bytes
    text = (
        "three checkpoints, two that are kept and one that is being written, need "
        f"{format_bytes(total_bytes)} on {demand.volume.path}"
    )
    if demand.volume.held_bytes:
        text += (
            f", where checkpoints of {format_bytes(demand.volume.held_bytes)} are already, and the "
            f"next one {format_bytes(demand.more_bytes)} more"
        )
    return text


def _memory_problems(
    demands: Sequence[SpaceDemand], staging_bytes: int, available_bytes: int
) -> Iterator[str]:
    in_memory = [demand for demand in demands if demand.volume.is_memory]
    needed_bytes = staging_bytes + sum(demand.more_bytes for demand in in_memory)
    if needed_bytes <= available_bytes:
        return
    text = f"the copy of the state that is written needs {format_bytes(staging_bytes)}"
    for demand in in_memory:
        text += f" and checkpoints in {demand.volume.path} {format_bytes(demand.more_bytes)}"
    place = f"choose a disk for them ({in_memory[0].key}), " if in_memory else ""
    yield (
        f"ckpt: {text} of host memory; {format_bytes(available_bytes)} are available. End other "
        f"programs, {place}{_REMEDY}."
    )


def _entries(path: Path) -> list[Path]:
    return list(path.iterdir()) if path.is_dir() else []


def _size_of(path: Path) -> int:
    """Bytes that the files in `path` take, as far as they can be looked at."""
    total_bytes = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total_bytes += Path(folder, name).lstat().st_blocks * 512
            except OSError:
                continue  # gone meanwhile
    return total_bytes


def _file_system_of(path: Path) -> str:
    """Type of the file system that `path` is on, "" where the system does not say."""
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    path = path.resolve()
    mounts = [line.split()[1:3] for line in lines]
    above = [(place.replace("\\040", " "), kind) for place, kind in mounts]
    above = [(place, kind) for place, kind in above if path.is_relative_to(place)]
    # Of mounts at the same place the last is seen.
    return max(reversed(above), key=lambda mount: len(mount[0]), default=("", ""))[1]
