"""Which rank reads which bytes: every span once, from the nearest copy, by whoever needs it most.

Pure: all ranks compute it from the same facts and come to the same answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hetero_fw.checkpoint.spans import Span


@dataclass(frozen=True, kw_only=True, order=True)
class Holder:
    """A rank that can read a file, and where.

    Attributes:
        distance: of the tier; smaller is nearer.
        source: number of the directory among those of the rank.
    """

    distance: tuple[int, int]
    rank: int
    source: int


def assign_spans(
    spans: Sequence[Span],
    holders: Mapping[str, Collection[Holder]],
    *,
    files: Sequence[str],
    world_size: int,
) -> tuple[Holder | None, ...]:
    """Who reads each of `spans`; None where nobody can.

    The nearest tier comes first. Among the ranks that have it there, one whose own part of the
    training lies in that shard is taken as long as that leaves it with no more than its share;
    otherwise the one with the least to read.

    Args:
        holders: by file name; a rank may hold a file in several directories.
        files: all files of the checkpoint; number n was written by rank n.
        world_size: number of ranks that read.
    """
    fair = -(-sum(span.size for span in spans) // world_size)
    homes = {name: _home_ranks(i, len(files), world_size) for i, name in enumerate(files)}
    own = dict.fromkeys(range(world_size), 0)
    for span in spans:
        if len(files) == world_size:  # the same division, unless the plan is another one
            own[homes[span.file].start] += span.size
    load = dict.fromkeys(range(world_size), 0)
    chosen: list[Holder | None] = []
    for span in spans:
        nearest = _nearest(holders.get(span.file, ()))
        at_home = [
            holder
            for holder in nearest
            if holder.rank in homes[span.file]
            and load[holder.rank] + span.size <= max(fair, own[holder.rank])
        ]
        best = min(at_home or nearest, key=lambda holder: (load[holder.rank], holder), default=None)
        if best is not None:
            load[best.rank] += span.size
        chosen.append(best)
    return tuple(chosen)


def _home_ranks(index: int, num_files: int, world_size: int) -> range:
    """Ranks whose part of the job overlaps that of the writer of file `index`."""
    first = index * world_size // num_files
    last = ((index + 1) * world_size - 1) // num_files
    return range(first, last + 1)


def _nearest(holders: Collection[Holder]) -> list[Holder]:
    distance = min((holder.distance for holder in holders), default=None)
    return [holder for holder in holders if holder.distance == distance]
