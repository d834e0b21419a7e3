"""Names of checkpoint directories, and the one rename that makes a checkpoint exist."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

MARKED = re.compile(r"\.(?P<mark>tmp|retired|replaced)-(?P<attempt>\d+)-\w+")


@dataclass(frozen=True, kw_only=True)
class DirectoryName:
    """A parsed name. `mark` is empty for a published checkpoint."""

    step: int
    mark: str = ""
    attempt: int | None = None


def checkpoint_path(root: Path, prefix: str, step: int) -> Path:
    """Where the checkpoint of `step` is published."""
    return Path(root) / f"{prefix}-step-{step:08d}"


def marked_path(path: Path, mark: str, attempt: int, token: str) -> Path:
    """A sibling of the published `path` that nobody takes for a checkpoint."""
    return path.with_name(f"{path.name}.{mark}-{attempt}-{token}")


def parse_name(name: str, prefix: str) -> DirectoryName | None:
    """Read a directory name; None if it is not one of ours."""
    match = re.fullmatch(rf"{re.escape(prefix)}-step-(\d{{8,}})(\..*)?", name)
    if match is None:
        return None
    if match[2] is None:
        return DirectoryName(step=int(match[1]))
    marked = MARKED.fullmatch(match[2])
    if marked is None:
        return None
    return DirectoryName(step=int(match[1]), mark=marked["mark"], attempt=int(marked["attempt"]))


def sync_directory(path: Path) -> None:
    """Wait until the entries of the directory `path` are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, final: Path, *, attempt: int, token: str) -> None:
    """Give the complete checkpoint in `temporary` its final name.

    A checkpoint that has this name already (one that was rejected when the run resumed) is moved
    aside first and deleted afterwards; `remove_stale_temporaries` moves it back if the process
    dies in between.
    """
    aside = marked_path(final, "replaced", attempt, token)
    has_predecessor = final.exists()
    if has_predecessor:
        final.rename(aside)
    try:
        temporary.rename(final)
        try:
            sync_directory(final.parent)
        except OSError:
            final.rename(temporary)  # a save that is reported as failed must not exist
            raise
    except OSError:
        if has_predecessor:
            aside.rename(final)
        raise
    if has_predecessor:
        shutil.rmtree(aside, ignore_errors=True)


def retire(path: Path, *, attempt: int, token: str) -> None:
    """Delete a published checkpoint; it stops being one before its first file goes."""
    doomed = marked_path(path, "retired", attempt, token)
    path.rename(doomed)
    sync_directory(path.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_stale_temporaries(root: Path, prefix: str, *, attempt: int) -> tuple[Path, ...]:
    """Remove what attempts up to `attempt` left unfinished. Returns what was removed.

    Rank 0 alone calls this, at the start of `attempt`, before anything is saved or restored.
    Directories of a later attempt are left alone: then this one is the stale one.
    """
    removed = []
    for path in sorted(Path(root).glob(f"{prefix}-step-*.*")):
        name = parse_name(path.name, prefix)
        if name is None or name.attempt is None or name.attempt > attempt:
            continue
        published = checkpoint_path(root, prefix, name.step)
        if name.mark == "replaced" and not published.exists():
            path.rename(published)
            continue
        shutil.rmtree(path, ignore_errors=True)
        removed.append(path)
    return tuple(removed)
