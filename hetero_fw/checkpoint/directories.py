"""Names of checkpoint directories, and the one rename that makes a checkpoint exist."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hetero_fw.checkpoint.save_point import OnPoint, SavePoint, pass_by

# Marks in the names of what was moved away from its published name.
REPLACED = ".replaced-"
PRUNED = ".pruned-"

# On an object store each save of a step has a name of its own.
_NAME = re.compile(
    r"(?P<prefix>.+)-step-(?P<step>\d{8,})(?:\.(?P<attempt>\d+)-(?P<token>[0-9a-zA-Z]+))?"
)


def checkpoint_name(prefix: str, step: int) -> str:
    """Name of the checkpoint of `step`."""
    return f"{prefix}-step-{step:08d}"


def checkpoint_path(root: Path, prefix: str, step: int) -> Path:
    """Where the checkpoint of `step` is published."""
    return Path(root) / checkpoint_name(prefix, step)


@dataclass(frozen=True, kw_only=True)
class CheckpointName:
    """The parts of a directory's name.

    Attributes:
        attempt: that has made it; None where the name does not tell.
        token: that tells it from other saves of the step; "" where there are none.
    """

    prefix: str
    step: int
    attempt: int | None = None
    token: str = ""


def parse_name(name: str) -> CheckpointName | None:
    """Take the name of a checkpoint's directory apart; None if it is not one."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return CheckpointName(
        prefix=match["prefix"],
        step=int(match["step"]),
        attempt=int(match["attempt"]) if match["attempt"] is not None else None,
        token=match["token"] or "",
    )


def version_name(name: str, attempt: int, token: str) -> str:
    """The directory of one save of the checkpoint `name`, where nothing can be renamed."""
    return f"{name}.{attempt}-{token}"


def step_of(name: str, prefix: str) -> int | None:
    """The step of a published checkpoint by its directory's name; None if it is not one."""
    parsed = parse_name(name)
    return parsed.step if parsed is not None and parsed.prefix == prefix else None


def sync_directory(path: Path) -> None:
    """Wait until the entries of the directory `path` are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(
    temporary: Path, final: Path, *, retired: Path, token: str, on_point: OnPoint = pass_by
) -> None:
    """Give the complete checkpoint in `temporary` its final name.

    A checkpoint that has this name already (one that was rejected when the run resumed) is moved
    to the directory `retired` first and deleted afterwards; the next attempt puts it back if the
    process dies in between. Never replaces a directory that appears meanwhile.

    Raises:
        OSError: it is not published. Also when a later attempt has taken `temporary` away.
    """
    aside = retired / f"{final.name}{REPLACED}{token}"
    has_predecessor = final.exists()
    on_point(SavePoint.PUBLISHING)
    if has_predecessor:
        final.rename(aside)
        on_point(SavePoint.SET_ASIDE)
    try:
        temporary.rename(final)
        try:
            sync_directory(final.parent)
            on_point(SavePoint.PUBLISHED)
        except Exception:  # also of one that was given up while the file system hung
            final.rename(temporary)  # a save that is reported as failed must not exist
            raise
    except Exception:
        if has_predecessor:
            with suppress(OSError):  # the next attempt puts it back, or did so already
                aside.rename(final)
        raise
    if has_predecessor:
        shutil.rmtree(aside, ignore_errors=True)


def retire(path: Path, *, into: Path, token: str, on_point: OnPoint = pass_by) -> None:
    """Delete a published checkpoint; it stops being one before its first file goes.

    Raises:
        OSError: it is still there. Also when a later attempt has taken `into` away.
    """
    doomed = into / f"{path.name}{PRUNED}{token}"
    on_point(SavePoint.RETIRING)
    path.rename(doomed)
    sync_directory(path.parent)
    on_point(SavePoint.RETIRED)
    shutil.rmtree(doomed, ignore_errors=True)
    on_point(SavePoint.DELETED)
