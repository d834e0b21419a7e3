"""What lies in a place by its names: checkpoints, their prefixes, runs."""

from __future__ import annotations

from collections.abc import Iterator

from hetero_fw.checkpoint.directories import parse_name, step_of
from hetero_fw.checkpoint.manifest import MANIFEST_NAME
from hetero_fw.checkpoint.object_store import ObjectStore
from hetero_fw.checkpoint.object_versions import take_snapshot
from hetero_fw.checkpoint.storage import StoragePath, is_object_store


def published_paths(root: StoragePath, prefix: str) -> Iterator[StoragePath]:
    """Directories with the name of a checkpoint, newest first, whatever is in them.

    On a remote storage, those that have a manifest and that no later attempt has ruled out; there
    may be several of a step, the newest first.

    Raises:
        StorageError: a remote storage refuses or does not answer.
    """
    if is_object_store(root):
        versions = take_snapshot(ObjectStore(root)).checkpoints(prefix)
        return (root / version.name for version in versions)
    steps = []
    for path in root.glob(f"{prefix}-step-*"):
        step = step_of(path.name, prefix)
        if step is not None and path.is_dir():
            steps.append((step, path))
    return (path for _, path in sorted(steps, reverse=True))


def prefixes_in(root: StoragePath) -> list[str]:
    """First parts of the names of the checkpoints in `root`.

    Raises:
        StorageError: a remote storage refuses or does not answer.
    """
    if is_object_store(root):
        return sorted({found.prefix for found in take_snapshot(ObjectStore(root)).checkpoints()})
    names = [parse_name(path.name) for path in root.glob("*-step-*") if path.is_dir()]
    return sorted({name.prefix for name in names if name is not None})


def runs_below(root: StoragePath) -> list[str]:
    """Names of the directories in `root` that hold checkpoints of whatever prefix.

    Raises:
        StorageError: a remote storage refuses or does not answer.
    """
    if is_object_store(root):
        keys = (key.split("/") for key in ObjectStore(root).list())
        found = {parts[0] for parts in keys if len(parts) > 2 and parse_name(parts[1])}
    else:
        manifests = root.glob(f"*/*-step-*/{MANIFEST_NAME}")
        found = {path.parent.parent.name for path in manifests if parse_name(path.parent.name)}
    return sorted(found)
