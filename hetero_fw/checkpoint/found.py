"""A checkpoint that was chosen by its manifest and its files' sizes; none of its bytes was read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetero_fw.checkpoint.manifest import Manifest
from hetero_fw.checkpoint.ranks import Ranks
from hetero_fw.checkpoint.sources import Rejection
from hetero_fw.checkpoint.whereabouts import Whereabouts

OnRejected = Callable[[Rejection], None]


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """What all ranks together can fill tensors from, by `fill_from`.

    Attributes:
        whereabouts: which rank can read which file where.
        on_rejected: called on all ranks for every directory that does not serve when it is read.
    """

    whereabouts: Whereabouts
    on_rejected: OnRejected

    @property
    def path(self) -> str:
        """The directory, or the nearest of several, for messages."""
        return self.whereabouts.nearest()

    @property
    def manifest(self) -> Manifest:
        return self.whereabouts.manifest

    @property
    def ranks(self) -> Ranks:
        return self.whereabouts.ranks

    @property
    def step(self) -> int:
        return self.manifest.step
