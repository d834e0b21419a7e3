"""The named points that a save passes, in order."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class SavePoint(StrEnum):
    """Where a save stands. A process may end at any of them without harm to a published checkpoint.

    Every rank passes those up to SHARD_SYNCED, rank 0 alone the others. SHARD_PIECE comes once for
    each piece of the shard, SET_ASIDE only where a checkpoint of the same step is replaced, those
    from RETIRING on once for each checkpoint that is deleted.
    """

    STAGING = "staging"
    STAGED = "staged"
    WRITING_SHARD = "writing_shard"
    SHARD_PIECE = "shard_piece"
    SHARD_WRITTEN = "shard_written"
    SHARD_SYNCED = "shard_synced"
    WRITING_MANIFEST = "writing_manifest"
    MANIFEST_WRITTEN = "manifest_written"
    PUBLISHING = "publishing"
    SET_ASIDE = "set_aside"
    PUBLISHED = "published"
    RETIRING = "retiring"
    RETIRED = "retired"
    DELETED = "deleted"


OnPoint = Callable[[SavePoint], None]


def pass_by(point: SavePoint) -> None:
    """The observer that does nothing."""
