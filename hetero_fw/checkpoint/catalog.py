"""Which checkpoints there are, and which of them can be trusted."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import chain
from typing import Any

from hetero_fw.checkpoint.directories import step_of
from hetero_fw.checkpoint.fencing import AttemptDirectories, fenced_by
from hetero_fw.checkpoint.hashing import HashAlgorithm
from hetero_fw.checkpoint.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    Metric,
    read_manifest,
)
from hetero_fw.checkpoint.object_store import ObjectStore
from hetero_fw.checkpoint.object_versions import newest_attempt, take_snapshot
from hetero_fw.checkpoint.published import published_paths
from hetero_fw.checkpoint.quarantine import Quarantine, read_quarantine
from hetero_fw.checkpoint.shard_file import FileHash
from hetero_fw.checkpoint.storage import StorageError, StoragePath, is_object_store
from hetero_fw.errors import CheckpointError
from hetero_fw.policies import AttemptStart, find_departure

# Of the checkpoint's path and what is wrong with it.
OnRejected = Callable[[Any, str], None]


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A published checkpoint, by its manifest; its shards were not looked at.

    Attributes:
        quarantine: why no run continues from it although its bytes are sound; None if one may.
    """

    path: StoragePath
    step: int
    attempt: int
    world_size: int
    plan_fingerprint: str
    created_time_s: float
    size_bytes: int
    reason: str
    is_finite: bool
    metric: Metric | None = None
    quarantine: str | None = None

    @property
    def is_sane(self) -> bool:
        """Whether training can go on from its values, as far as anybody knows."""
        return self.is_finite and self.quarantine is None


def list_checkpoints(root: StoragePath, prefix: str) -> tuple[CheckpointInfo, ...]:
    """Published checkpoints with a readable manifest, newest first.

    Raises:
        StorageError: a remote storage refuses or does not answer.
    """
    infos: list[CheckpointInfo] = []
    paths = list(published_paths(root, prefix))
    quarantine = read_quarantine(root) if paths else Quarantine()
    for path in paths:
        try:
            infos.append(read_info(path, prefix, quarantine))
        except CheckpointError as error:
            if _may_be_intact(error):
                raise
    return tuple(infos)


def verify_checkpoint(checkpoint: CheckpointInfo | StoragePath) -> None:
    """Compare every byte with the manifest.

    Raises:
        CheckpointError: names the first file that is not as it was written, and how.
        StorageError: a remote storage refuses or does not answer.
    """
    path = checkpoint.path if isinstance(checkpoint, CheckpointInfo) else checkpoint
    manifest = read_manifest(path)
    for file in manifest.files:
        verify_file(path, file, manifest.hash)


def find_restorable(
    root: StoragePath,
    prefix: str,
    on_rejected: OnRejected,
    starts: Collection[AttemptStart] = (),
) -> CheckpointInfo | None:
    """Newest checkpoint whose every byte is as it was written; None if there is none.

    Called by one rank, which tells the others. `on_rejected(path, reason)` is called for every
    newer one that failed. Those that attempts have left behind, by their `starts`, come last.

    Raises:
        StorageError: a remote storage does not answer. Going back to an older checkpoint would
            lose work for nothing then.
    """
    departed: list[StoragePath] = []
    for path in chain(published_paths(root, prefix), departed):
        try:
            manifest = _manifest_of(path, prefix)
            if path not in departed and find_departure(manifest.step, manifest.attempt, starts):
                departed.append(path)
                continue
            info = _intact(path, manifest)
        except CheckpointError as error:
            if _may_be_intact(error):
                raise
            on_rejected(path, str(error))
        else:
            return info
    return None


def _intact(path: StoragePath, manifest: Manifest) -> CheckpointInfo:
    """The checkpoint's facts, if a run can continue from it."""
    if not manifest.is_finite:
        raise CheckpointError(f"{path}: it holds values that are not finite")
    info = info_of(path, manifest)
    if info.quarantine is not None:
        raise CheckpointError(f"{path}: {info.quarantine}")
    verify_checkpoint(path)
    return info


def num_attempts(root: StoragePath) -> int:
    """One more than the number of the newest attempt that has begun to keep checkpoints here.

    Where none has left a trace, because the run is over or the checkpoints were copied, that of
    the newest one that a checkpoint is from.

    Raises:
        StorageError: a remote storage refuses or does not answer.
    """
    if is_object_store(root):
        newest = newest_attempt(ObjectStore(root))
    else:
        later = fenced_by(AttemptDirectories(root=root, attempt=-1))
        newest = -1 if later is None else later
    return (newest if newest >= 0 else _newest_saver(root)) + 1


def _newest_saver(root: StoragePath) -> int:
    """Number of the newest attempt that a checkpoint is from, -1 if there is none."""
    found = [-1]
    paths: list[StoragePath] = []
    if is_object_store(root):
        paths += [root / version.name for version in take_snapshot(ObjectStore(root)).checkpoints()]
    else:
        paths += root.glob("*-step-*")
    for path in paths:
        try:
            found.append(read_manifest(path).attempt)
        except CheckpointError as error:
            if _may_be_intact(error):
                raise
    return max(found)


def read_info(
    path: StoragePath, prefix: str, quarantine: Quarantine | None = None
) -> CheckpointInfo:
    """What the manifest of the published checkpoint `path` says.

    Raises:
        CheckpointError: the manifest cannot be read or belongs to another step.
    """
    return info_of(path, _manifest_of(path, prefix), quarantine)


def _manifest_of(path: StoragePath, prefix: str) -> Manifest:
    manifest = read_manifest(path)
    if step_of(path.name, prefix) != manifest.step:
        raise CheckpointError(f"{path / MANIFEST_NAME}: is the manifest of step {manifest.step}")
    return manifest


def info_of(
    path: StoragePath, manifest: Manifest, quarantine: Quarantine | None = None
) -> CheckpointInfo:
    """The facts of a manifest that was read, and of `quarantine`, which is read if it is None."""
    if quarantine is None:
        quarantine = read_quarantine(path.parent)
    return CheckpointInfo(
        path=path,
        step=manifest.step,
        attempt=manifest.attempt,
        world_size=manifest.world_size,
        plan_fingerprint=manifest.plan_fingerprint,
        created_time_s=manifest.created_time_s,
        size_bytes=manifest.size_bytes,
        reason=manifest.reason,
        is_finite=manifest.is_finite,
        metric=manifest.metric,
        quarantine=quarantine.reason(manifest.step, manifest.attempt),
    )


def _may_be_intact(error: CheckpointError) -> bool:
    return isinstance(error, StorageError) and error.is_transient


def verify_file(directory: StoragePath, file: FileEntry, algorithm: HashAlgorithm) -> None:
    """Compare every byte of one shard file with the manifest's entry `file`, by its algorithm.

    Raises:
        CheckpointError: it is not as it was written. Names it and says how.
        StorageError: a remote storage refuses or does not answer.
    """
    verify_further(FileHash(directory / file.name, algorithm), file)


def verify_further(
    found: FileHash, file: FileEntry, go_on: Callable[[], bool] = lambda: True
) -> bool:
    """Read on as long as `go_on` allows; once all is read, compare as `verify_file`.

    Returns:
        whether all was read.
    """
    path = found.path
    try:
        if not found.read_on(go_on):
            return False
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    if found.size != file.size:
        raise CheckpointError(f"{path}: has {found.size} bytes, {file.size} were written")
    if found.hexdigest() != file.digest:
        raise CheckpointError(
            f"{path}: its bytes are not those that were written ({found.algorithm})"
        )
    return True
