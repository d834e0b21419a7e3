"""Which checkpoints there are, which of them can be trusted, which may go."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from hetero_fw.checkpoint.directories import checkpoint_path, parse_name, retire
from hetero_fw.checkpoint.manifest import FileEntry, Manifest, read_manifest
from hetero_fw.checkpoint.shard_file import hash_file
from hetero_fw.errors import CheckpointError
from hetero_fw.policies import decide_retention

OnRejected = Callable[[Path, str], None]

# As many as retention protects.
NUM_TO_VERIFY = 2


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A published checkpoint, by its manifest; its shards were not looked at."""

    path: Path
    step: int
    attempt: int
    world_size: int
    plan_fingerprint: str
    created_time_s: float
    size_bytes: int
    reason: str
    is_finite: bool


@dataclass(frozen=True, kw_only=True)
class PruneReport:
    """What `prune` deleted, which steps it knows to be intact, and why it stopped there."""

    deleted: tuple[Path, ...]
    verified_steps: frozenset[int]
    reason: str


def list_checkpoints(root: Path, prefix: str) -> tuple[CheckpointInfo, ...]:
    """Published checkpoints with a readable manifest, newest first."""
    infos = []
    for path in _published(root, prefix):
        try:
            infos.append(_info(path, _manifest_of(path, prefix)))
        except CheckpointError:
            continue
    return tuple(infos)


def verify_checkpoint(checkpoint: CheckpointInfo | Path) -> None:
    """Compare every byte with the manifest.

    Raises:
        CheckpointError: names the first file that is not as it was written, and how.
    """
    path = checkpoint.path if isinstance(checkpoint, CheckpointInfo) else Path(checkpoint)
    for file in read_manifest(path).files:
        _verify_file(path, file)


def find_restorable(root: Path, prefix: str, on_rejected: OnRejected) -> CheckpointInfo | None:
    """Newest checkpoint whose every byte is as it was written; None if there is none.

    Called by one rank, which tells the others. `on_rejected(path, reason)` is called for every
    newer one that failed.
    """
    for path in _published(root, prefix):
        try:
            manifest = _manifest_of(path, prefix)
            if not manifest.is_finite:
                raise CheckpointError(f"{path}: it holds values that are not finite")
            verify_checkpoint(path)
        except CheckpointError as error:
            on_rejected(path, str(error))
        else:
            return _info(path, manifest)
    return None


def prune(
    root: Path,
    prefix: str,
    *,
    keep_latest_k: int,
    verified_steps: Collection[int] = (),
    attempt: int = 0,
) -> PruneReport:
    """Delete what `policies.decide_retention` gives up. Called by one rank.

    Args:
        root: directory of the checkpoints.
        prefix: first part of their names.
        keep_latest_k: how many of the newest stay.
        verified_steps: steps that the caller has verified before; they are not read again.
        attempt: marks what a crash in the middle of a deletion leaves behind.

    Raises:
        OSError: a checkpoint cannot be moved out of the way.
    """
    committed = [info.step for info in list_checkpoints(root, prefix)]
    verified = frozenset(verified_steps) & frozenset(committed)
    if len(committed) > keep_latest_k:  # otherwise nothing can go and nothing needs to be read
        verified = _verify_newest(root, prefix, committed, verified)
    decision = decide_retention(committed, verified_steps=verified, keep_latest_k=keep_latest_k)
    deleted = tuple(checkpoint_path(root, prefix, step) for step in decision.delete_steps)
    for path in deleted:
        retire(path, attempt=attempt, token=secrets.token_hex(4))
    return PruneReport(
        deleted=deleted,
        verified_steps=verified - frozenset(decision.delete_steps),
        reason=decision.reason,
    )


def _published(root: Path, prefix: str) -> Iterator[Path]:
    """Directories with the name of a checkpoint, newest first."""
    steps = []
    for path in Path(root).glob(f"{prefix}-step-*"):
        name = parse_name(path.name, prefix)
        if name is not None and not name.mark and path.is_dir():
            steps.append((name.step, path))
    return (path for _, path in sorted(steps, reverse=True))


def _manifest_of(path: Path, prefix: str) -> Manifest:
    manifest = read_manifest(path)
    name = parse_name(path.name, prefix)
    if name is None or name.step != manifest.step:
        raise CheckpointError(f"{path}: its manifest is that of step {manifest.step}")
    return manifest


def _info(path: Path, manifest: Manifest) -> CheckpointInfo:
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
    )


def _verify_file(directory: Path, file: FileEntry) -> None:
    path = directory / file.name
    try:
        size, digest = hash_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    if size != file.size:
        raise CheckpointError(f"{path}: has {size} bytes, {file.size} were written")
    if digest != file.xxh3_128:
        raise CheckpointError(f"{path}: its bytes are not those that were written (xxh3_128)")


def _verify_newest(
    root: Path, prefix: str, committed: Collection[int], verified: frozenset[int]
) -> frozenset[int]:
    """Verify from the newest down until enough are known to be intact."""
    intact: set[int] = set()
    for step in sorted(committed, reverse=True):
        if len(intact) == NUM_TO_VERIFY:
            break
        if step not in verified:
            try:
                verify_checkpoint(checkpoint_path(root, prefix, step))
            except CheckpointError:
                continue
        intact.add(step)
    return frozenset(intact)
