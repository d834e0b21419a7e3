"""Which subsets of a cluster are worth evaluating."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from hetero_fw.planning.pool import Counts, DevicePool

MAX_GRID = 256


def candidate_counts(pool: DevicePool, num_samples: int) -> list[Counts]:
    """Subsets of at most `num_samples` devices, without duplicates, as device counts per class.

    A small cluster yields every combination of counts. A large one yields a coarser grid, every
    whole-node prefix of the devices from fastest to slowest, and those prefixes of each class.
    All devices (or the fastest, one for each sample), each class alone and one device of each
    class are always among them.
    """
    sizes = pool.all_counts
    alone = (_alone(pool, index) for index in range(len(sizes)))
    found = dict.fromkeys(
        itertools.chain([_fastest(sizes, num_samples)], _grid(sizes), _prefixes(pool), *alone)
    )
    return [counts for counts in found if 0 < sum(counts) <= num_samples]


def _fastest(sizes: Counts, num_devices: int) -> Counts:
    counts = []
    for size in sizes:
        counts.append(min(size, num_devices))
        num_devices -= counts[-1]
    return tuple(counts)


def _grid(sizes: Counts) -> Iterator[Counts]:
    for levels in (_every_count, _powers_of_two, _all_or_none):
        axes = [levels(size) for size in sizes]
        if math.prod(len(axis) for axis in axes) <= MAX_GRID:
            return itertools.product(*axes)
    return iter(())


def _every_count(size: int) -> Sequence[int]:
    return range(size + 1)


def _powers_of_two(size: int) -> Sequence[int]:
    return [0, *(2**power for power in range(size.bit_length()) if 2**power < size), size]


def _all_or_none(size: int) -> Sequence[int]:
    return [0, size]


def _prefixes(pool: DevicePool) -> Iterator[Counts]:
    sizes = pool.all_counts
    for index in range(len(sizes)):
        for count in _node_ends(pool, index):
            yield (*sizes[:index], count, *(0 for _ in sizes[index + 1 :]))


def _alone(pool: DevicePool, index: int) -> Iterator[Counts]:
    for count in (1, *_node_ends(pool, index)):
        yield tuple(count if i == index else 0 for i in range(len(pool.classes)))


def _node_ends(pool: DevicePool, index: int) -> list[int]:
    """Counts that use whole nodes; at most 64 of them, evenly spaced."""
    ends = list(itertools.accumulate(size for _, size in pool.classes[index].nodes))
    stride = math.ceil(len(ends) / 64)
    return sorted({*ends[stride - 1 :: stride], ends[-1]})
