"""Each attempt works in directories of its own, and a later attempt takes them away.

An attempt writes unfinished saves to `.staging-<attempt>/` and moves what it gives up to
`.retired-<attempt>/`. It makes both once, when it begins; where they are gone it does not make
them again, unless the whole directory of the checkpoints is gone and no later attempt has begun.
A later attempt first renames these directories. From then on every path through which the older
one creates, publishes or deletes leads nowhere, whatever it was doing when it was cut off, stopped
or requeued: its renames and its new files fail. Files that it holds open are in a directory that
is being deleted. A rename that was inside the kernel at that moment is complete or fails; it
cannot replace a published checkpoint, because a directory is never renamed over one with content.

This needs a file system that all attempts see, with atomic renames, as POSIX has them.
"""

from __future__ import annotations

import errno
import re
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hetero_fw.checkpoint.directories import REPLACED, sync_directory
from hetero_fw.checkpoint.sources import patiently
from hetero_fw.errors import CheckpointError
from hetero_fw.monitoring import attempt_numbers
from hetero_fw.policies import RetryRule

# An attempt that cannot begin has made no progress, and the run has few of these: an error that
# says nothing, such as EIO, may pass as well as one that says so.
_RULE = RetryRule(max_unknown_tries=RetryRule.max_tries)

_OWNED = re.compile(r"\.(staging|retired)-(\d+)")
_DEAD = ".dead-"


@dataclass(frozen=True, kw_only=True)
class AttemptDirectories:
    """Where `attempt` works below `root`, the directory of the checkpoints. Creates nothing."""

    root: Path
    attempt: int

    @property
    def staging(self) -> Path:
        """Unfinished saves."""
        return self.root / f".staging-{self.attempt}"

    @property
    def retired(self) -> Path:
        """Checkpoints on their way to deletion."""
        return self.root / f".retired-{self.attempt}"


def claim_attempt(root: Path, attempt: int, patience_s: float = 0.0) -> AttemptDirectories:
    """Begin `attempt`: make its directories and fence every older one.

    Also clears what older attempts left behind and puts back a checkpoint whose replacement was
    cut short. Rank 0 alone calls this, once, before it looks for a checkpoint to restore.

    Args:
        root: directory of the checkpoints; made if it is missing.
        attempt: larger than the number of any attempt before.
        patience_s: how long to try again what the storage does not answer properly.

    Raises:
        CheckpointError: this or a later attempt has begun already, so this one is stale; or the
            storage refuses.
    """
    own = AttemptDirectories(root=Path(root), attempt=attempt)
    claim = _Claim(own)
    try:
        patiently(own.root, claim.make, patience_s, _RULE)
    except OSError as error:
        raise CheckpointError(f"cannot keep checkpoints in {root}: {error}") from error
    return own


def leave_attempt(own: AttemptDirectories, *, leaves_trace: bool = False) -> None:
    """End an attempt that nothing follows: take its directories away, unless something is in them.

    Older ones stay fenced, whose directories are gone for good. Never raises.

    Args:
        leaves_trace: one directory stays, empty, until the next attempt begins. An older attempt
            that still runs sees by it that it is fenced, and not that its place is gone.
    """
    for directory in (own.staging,) if leaves_trace else (own.staging, own.retired):
        with suppress(OSError):
            directory.rmdir()


def fenced_by(own: AttemptDirectories) -> int | None:
    """Number of the newest later attempt, None if there is none or the storage does not say."""
    try:
        newest = _newest_attempt(own.root)
    except OSError:
        return None
    return newest if newest > own.attempt else None


def remake(own: AttemptDirectories, attempts: Path) -> bool:
    """Make the directory of the checkpoints again after somebody moved or deleted it as a whole.

    A later attempt would have made it again itself, and this one then fails here: a directory is
    not renamed to one with content. One that has begun and lost its own is known by `attempts`.

    Args:
        own: what is gone.
        attempts: directory with an entry for each attempt of the run, named by its number.

    Returns:
        Whether it is there again, empty; False if that is not this attempt's to decide.
    """
    made = own.root.with_name(f".{own.root.name}-{secrets.token_hex(4)}")
    try:
        if own.root.exists() or max(attempt_numbers(attempts), default=-1) != own.attempt:
            return False
        for directory in (made, made / own.staging.name, made / own.retired.name):
            directory.mkdir()
        made.rename(own.root)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        return False
    return True


def dead_directory(root: Path) -> Path:
    """A new directory for what is to be deleted outside of any attempt."""
    path = Path(root) / f"{_DEAD}{secrets.token_hex(4)}"
    path.mkdir()
    return path


def _owned(root: Path) -> list[tuple[Path, int]]:
    """Directories of attempts, with their numbers."""
    matches = [(path, _OWNED.fullmatch(path.name)) for path in root.iterdir()]
    return [(path, int(match[2])) for path, match in matches if match is not None]


def _newest_attempt(root: Path) -> int:
    return max((number for _, number in _owned(root)), default=-1)


class _Claim:
    """The beginning of an attempt; what one try has left half done, the next one completes."""

    def __init__(self, own: AttemptDirectories) -> None:
        self._own = own
        self._may_be_made = False

    def make(self) -> None:
        self._own.root.mkdir(parents=True, exist_ok=True)
        self._make_staging()
        _begin(self._own)
        _fence_older(self._own)
        _bury(self._own.root)

    def _make_staging(self) -> None:
        """Only the first to make it may go on; a directory is made in one piece or not at all."""
        try:
            self._own.staging.mkdir()
        except FileExistsError:
            if not self._may_be_made:
                raise CheckpointError(
                    f"attempt {self._own.attempt} has begun before in {self._own.root}; every "
                    "attempt needs a number of its own."
                ) from None
        except OSError:
            # A network file system may have made it all the same, and lost the answer.
            self._may_be_made = True
            raise
        self._may_be_made = True


def _begin(own: AttemptDirectories) -> None:
    own.retired.mkdir(exist_ok=True)
    # Only now look for others: of two attempts that begin at once, at least one sees the other,
    # and whichever sees which, the older one ends here or is fenced.
    newest = _newest_attempt(own.root)
    if newest > own.attempt:
        leave_attempt(own)
        raise CheckpointError(
            f"attempt {own.attempt} is fenced by attempt {newest}, which keeps checkpoints in "
            f"{own.root}. If that is none of this run, delete its directories .*-{newest} there."
        )


def _fence_older(own: AttemptDirectories) -> None:
    older = [path for path, number in _owned(own.root) if number < own.attempt]
    # Staging first: what cannot be published any more cannot leave a replacement half done either.
    for path in sorted(older, key=lambda path: path.name, reverse=True):
        with suppress(FileNotFoundError):  # another attempt that begins was faster
            path.rename(own.root / f"{_DEAD}{path.name[1:]}-{secrets.token_hex(4)}")
    sync_directory(own.root)


def _bury(root: Path) -> None:
    """Delete dead directories, also those that an interrupted call has left."""
    for dead in sorted(root.glob(f"{_DEAD}*")):
        for aside in dead.glob(f"*{REPLACED}*"):
            _put_back(aside, root)
        shutil.rmtree(dead, ignore_errors=True)


def _put_back(aside: Path, root: Path) -> None:
    published = root / aside.name.rpartition(REPLACED)[0]
    try:
        aside.rename(published)
    except OSError as error:
        # There is a successor, or somebody else has put it back.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
