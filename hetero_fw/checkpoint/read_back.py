"""Read published checkpoints back, so that older ones may go."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from hetero_fw.checkpoint.catalog import CheckpointInfo, verify_further
from hetero_fw.checkpoint.hashing import HashAlgorithm
from hetero_fw.checkpoint.manifest import FileEntry, read_manifest
from hetero_fw.checkpoint.shard_file import FileHash
from hetero_fw.checkpoint.storage import StorageError, StorageHangs
from hetero_fw.errors import CheckpointError
from hetero_fw.policies import MIN_KEPT

# Called while bytes are read; whether there is time to read more.
GoOn = Callable[[], bool]


class Saved(NamedTuple):
    """One checkpoint of a step. A step that is saved again has another one."""

    step: int
    name: str
    created_time_s: float


@dataclass(frozen=True, kw_only=True)
class Intact:
    """What was read back, and how it was found.

    Attributes:
        checkpoints: that are as they were written, as a whole.
        unread: steps that count without having been read.
        files: that are, by name, of checkpoints of which not all was read yet.
        damaged: checkpoints with a file that is not.
        begun: the checkpoint in which reading was cut off.
    """

    checkpoints: frozenset[Saved] = frozenset()
    unread: frozenset[int] = frozenset()
    files: frozenset[tuple[Saved, str]] = frozenset()
    damaged: frozenset[Saved] = frozenset()
    begun: Saved | None = None

    @property
    def steps(self) -> frozenset[int]:
        """Of checkpoints that count as verified."""
        return frozenset(saved.step for saved in self.checkpoints) | self.unread

    def holds(self, info: CheckpointInfo) -> bool:
        """Whether a checkpoint counts as verified."""
        return _saved(info) in self.checkpoints or info.step in self.unread

    def but(self, steps: Collection[int]) -> Intact:
        """Without these steps."""
        return replace(
            self,
            checkpoints=frozenset(item for item in self.checkpoints if item.step not in steps),
            unread=self.unread - frozenset(steps),
        )


NOTHING_READ = Intact()

# Of files that were read in part, in this process: a slice of time may end within one.
_unfinished: dict[tuple[str, Saved], FileHash] = {}
_MAX_UNFINISHED = 8


def always() -> bool:
    """There is time for all of it."""
    return True


def read_newest(
    infos: Collection[CheckpointInfo], known: Intact, go_on: GoOn = always
) -> tuple[Intact, bool]:
    """Read from the newest down until as many are intact as retention protects.

    Args:
        infos: all the checkpoints there are, one of each step.
        known: is not read again.
        go_on: called after every piece; once it returns False, reading ends. The next call in the
            same process continues there.

    Returns:
        What is known to be intact, and whether that is of all that was to be read.

    Raises:
        StorageError: a remote storage does not answer properly, which says nothing of the bytes.
    """
    reader = _Reader(known, go_on)
    newest_first = sorted(infos, key=lambda info: (info.attempt, info.step), reverse=True)
    sane = [info for info in newest_first if info.is_sane]  # as retention orders them
    # First what was begun: it would never end where a checkpoint takes longer to read than the next
    # takes to come.
    for info in sane:
        if _saved(info) == known.begun and reader.judge(info) is None:
            return reader.report(sane, info), False
    intact: list[CheckpointInfo] = []
    for info in sane:
        if len(intact) == MIN_KEPT:
            break
        is_intact = reader.judge(info)
        if is_intact is None:
            return reader.report(sane, info), False
        intact += [info] * is_intact
    return reader.report(intact), True


def _saved(info: CheckpointInfo) -> Saved:
    return Saved(info.step, info.path.name, info.created_time_s)


class _Reader:
    """Reads checkpoints file by file, and remembers how each was found."""

    def __init__(self, known: Intact, go_on: GoOn) -> None:
        self._intact = set(known.checkpoints)
        self._files = set(known.files)
        self._damaged = set(known.damaged)
        self._go_on = go_on
        self._has_read = False

    def report(
        self, infos: Collection[CheckpointInfo], begun: CheckpointInfo | None = None
    ) -> Intact:
        """What is known of `infos`."""
        return Intact(
            checkpoints=frozenset(map(_saved, infos)) & self._intact,
            files=frozenset(self._files),
            damaged=frozenset(self._damaged),
            begun=None if begun is None else _saved(begun),
        )

    def judge(self, info: CheckpointInfo) -> bool | None:
        """Whether a checkpoint is intact; None if there was no time to read all of it.

        Raises:
            StorageError: a remote storage refuses or does not answer.
        """
        if _saved(info) in self._damaged:
            return False
        if _saved(info) in self._intact:
            return True
        try:
            if not self._finish(info):
                return None
        except StorageHangs:
            raise  # this was given up meanwhile, and says nothing of the bytes
        except CheckpointError as error:
            if isinstance(error, StorageError) and not error.is_absent:
                raise
            if not _may_pass(error):
                self._damaged.add(_saved(info))
            self._forget(info)
            return False
        self._intact.add(_saved(info))
        self._forget(info)
        return True

    def _finish(self, info: CheckpointInfo) -> bool:
        """Read what is not known yet; False if there was no time for all."""
        manifest = read_manifest(info.path)
        saved = _saved(info)
        for file in manifest.files:
            if (saved, file.name) in self._files:
                continue
            if self._has_read and not self._go_on():
                return False
            self._has_read = True
            if not self._read(info, file, manifest.hash):
                return False
            self._files.add((saved, file.name))
        return True

    def _forget(self, info: CheckpointInfo) -> None:
        self._files = {item for item in self._files if item[0] != _saved(info)}

    def _read(self, info: CheckpointInfo, file: FileEntry, algorithm: HashAlgorithm) -> bool:
        path = info.path / file.name
        key = (str(path), _saved(info))
        found = _unfinished.pop(key, None) or FileHash(path, algorithm)
        try:
            is_complete = verify_further(found, file, self._go_on)
        except StorageError:
            _keep(key, found)  # the next call need not begin again
            raise
        if not is_complete:
            _keep(key, found)
        return is_complete


def _may_pass(error: CheckpointError) -> bool:
    """Whether a local file could not be read, which another time it may be."""
    cause = error.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)


def _keep(key: tuple[str, Saved], found: FileHash) -> None:
    while len(_unfinished) >= _MAX_UNFINISHED:
        _unfinished.pop(next(iter(_unfinished)))
    _unfinished[key] = found
