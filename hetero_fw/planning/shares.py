"""Whole samples for each rank, and micro-batches for each share."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SpeedGroup:
    """Ranks of equal speed.

    Attributes:
        num_ranks: how many there are.
        sample_s: seconds one of them takes for one sample.
        max_samples: most samples one of them may take.
    """

    num_ranks: int
    sample_s: float
    max_samples: int


def balanced_shares(
    num_samples: int, groups: Sequence[SpeedGroup]
) -> tuple[tuple[int, ...], ...] | None:
    """Split `num_samples` so that the last rank finishes as early as possible.

    Every rank gets at least one sample. The samples are alike, so handing each one to the rank
    that would finish it first is optimal; most of that is done at once by a search for the time
    at which all but the last few samples are handed out.

    Returns:
        The shares of each group's ranks, None if the ranks are too many or cannot take them all.
    """
    num_ranks = sum(group.num_ranks for group in groups)
    capacity = sum(group.num_ranks * group.max_samples for group in groups)
    if num_ranks > num_samples or capacity < num_samples or any(g.max_samples < 1 for g in groups):
        return None
    levels = _levels_before_last(num_samples, groups)
    rest = num_samples - sum(g.num_ranks * n for g, n in zip(groups, levels, strict=True))
    extras = [0] * len(groups)
    queue = [
        ((levels[i] + 1) * group.sample_s, i)
        for i, group in enumerate(groups)
        if levels[i] < group.max_samples
    ]
    heapq.heapify(queue)
    while rest:
        _, i = heapq.heappop(queue)
        extras[i] = min(rest, groups[i].num_ranks)
        rest -= extras[i]
        if extras[i] == groups[i].num_ranks:
            levels[i], extras[i] = levels[i] + 1, 0
            if levels[i] < groups[i].max_samples:
                heapq.heappush(queue, ((levels[i] + 1) * groups[i].sample_s, i))
    return tuple(
        (level + 1,) * extra + (level,) * (group.num_ranks - extra)
        for group, level, extra in zip(groups, levels, extras, strict=True)
    )


def _levels_before_last(num_samples: int, groups: Sequence[SpeedGroup]) -> list[int]:
    """Shares of each group at a time when at most `num_samples` are done, and nearly all are."""
    early, late = 0.0, num_samples * max(group.sample_s for group in groups)
    for _ in range(48):
        middle = (early + late) / 2
        done = sum(g.num_ranks * n for g, n in zip(groups, _levels(middle, groups), strict=True))
        early, late = (middle, late) if done <= num_samples else (early, middle)
    return _levels(early, groups)


def _levels(time_s: float, groups: Sequence[SpeedGroup]) -> list[int]:
    return [min(max(int(time_s / g.sample_s), 1), g.max_samples) for g in groups]


def split_microbatches(num_samples: int, num_microbatches: int) -> tuple[int, ...]:
    """Cut a share into micro-batches whose sizes differ by at most one, larger ones first.

    Zeros, for padding micro-batches, occur only if there are fewer samples than micro-batches.
    """
    size, extra = divmod(num_samples, num_microbatches)
    return (size + 1,) * extra + (size,) * (num_microbatches - extra)
