"""Read published checkpoints back, so that older ones may go."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from hetero_fw.checkpoint.catalog import CheckpointInfo, verify_file
from hetero_fw.checkpoint.manifest import read_manifest
from hetero_fw.checkpoint.storage import StorageError
from hetero_fw.errors import CheckpointError
from hetero_fw.policies import MIN_KEPT

# Called while bytes are read; whether there is time to read more.
GoOn = Callable[[], bool]


@dataclass(frozen=True, kw_only=True)
class Intact:
    """What was read back and is as it was written.

    Attributes:
        steps: of whole checkpoints.
        files: of checkpoints of which not all was read yet.
    """

    steps: frozenset[int] = frozenset()
    files: frozenset[str] = frozenset()

    def but(self, steps: Collection[int]) -> Intact:
        """Without these steps."""
        return Intact(steps=self.steps - frozenset(steps), files=self.files)


NOTHING_READ = Intact()


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
        go_on: once it returns False, reading ends with the file. One is read in any case.

    Returns:
        What is intact, and whether there was time to find it out.

    Raises:
        StorageError: a remote storage does not answer properly, which says nothing of the bytes.
    """
    reader = _Reader(known.files, go_on)
    begun = {key.partition("/")[0] for key in known.files}
    intact: set[int] = set()
    # As retention orders them, but first what was begun: it would never end where a checkpoint
    # takes longer to read than the next takes to come.
    for info in sorted(
        infos, key=lambda info: (info.path.name in begun, info.attempt, info.step), reverse=True
    ):
        if len(intact) == MIN_KEPT:
            break
        if not info.is_sane:
            continue
        if info.step not in known.steps:
            try:
                if not reader.finish(info):
                    steps = known.steps & {info.step for info in infos} | intact
                    return Intact(steps=steps, files=frozenset(reader.files)), False
            except StorageError as error:
                if not error.is_absent:
                    raise
                continue
            except CheckpointError:
                continue
        intact.add(info.step)
    return Intact(steps=frozenset(intact)), True


class _Reader:
    """Reads checkpoints file by file.

    Attributes:
        files: that are as they were written, of checkpoints of which not all was read yet.
    """

    def __init__(self, files: Collection[str], go_on: GoOn) -> None:
        self.files = set(files)
        self._go_on = go_on
        self._num_read = 0

    def finish(self, info: CheckpointInfo) -> bool:
        """Read the files that are not known yet; False if there was no time for all.

        Raises:
            CheckpointError: one is not as it was written.
            StorageError: a remote storage refuses or does not answer.
        """
        manifest = read_manifest(info.path)
        files = {f"{info.path.name}/{file.name} {file.digest}": file for file in manifest.files}
        for key, file in files.items():
            if key in self.files:
                continue
            if self._num_read and not self._go_on():
                return False
            self._num_read += 1
            verify_file(info.path, file, manifest.hash, self._go_on)
            self.files.add(key)
        self.files.difference_update(files)
        return True
