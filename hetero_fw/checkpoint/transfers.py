"""Who sends which part of which chunk to whom, in windows of bounded size.

Pure: all ranks compute it from what all of them need and come to the same answer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Every part starts at a multiple of this in a window, so that it can be viewed as its dtype.
PART_ALIGNMENT_BYTES = 16

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Need:
    """A box of a chunk that a rank wants and another rank holds.

    Attributes:
        chunk: number of the chunk.
        offsets: where the box begins in the chunk.
    """

    owner: int
    chunk: int
    itemsize: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a need that travels at once.

    Attributes:
        need: number of the need among those of the receiver.
        start: where the piece begins in the box of the need.
    """

    source: int
    target: int
    need: int
    start: tuple[int, ...]
    lengths: tuple[int, ...]
    num_bytes: int

    @property
    def room_bytes(self) -> int:
        """Bytes that it takes in a window."""
        return -(-self.num_bytes // PART_ALIGNMENT_BYTES) * PART_ALIGNMENT_BYTES


def plan_windows(needs: Sequence[Sequence[Need]], limit_bytes: int) -> list[list[Part]]:
    """Everything that the ranks need, in as few windows as a simple rule finds.

    In no window does any rank send or receive more than `limit_bytes`.

    Args:
        needs: of each rank, in rank order.
    """
    queues = [deque(parts) for parts in _parts_by_source(needs, limit_bytes // 8)]
    windows = []
    while any(queues):
        windows.append(_next_window(queues, limit_bytes))
    return windows


def _parts_by_source(needs: Sequence[Sequence[Need]], limit_bytes: int) -> list[list[Part]]:
    by_source: list[list[tuple[int, Part]]] = [[] for _ in needs]
    for target, wanted in enumerate(needs):
        for number, need in enumerate(wanted):
            for start, lengths in split_box(need.lengths, limit_bytes // need.itemsize):
                part = Part(
                    source=need.owner,
                    target=target,
                    need=number,
                    start=start,
                    lengths=lengths,
                    num_bytes=math.prod(lengths) * need.itemsize,
                )
                by_source[need.owner].append((need.chunk, part))
    # Chunk by chunk, so that their memory is soon free; the receivers of one take turns.
    return [
        [part for _, part in sorted(parts, key=lambda item: (item[0], item[1].start))]
        for parts in by_source
    ]


def _next_window(queues: Sequence[deque[Part]], limit_bytes: int) -> list[Part]:
    sent, received = [0] * len(queues), [0] * len(queues)
    window = []
    for source, queue in enumerate(queues):
        while queue:
            room = queue[0].room_bytes
            if max(sent[source], received[queue[0].target]) + room > limit_bytes:
                break
            part = queue.popleft()
            sent[source] += room
            received[part.target] += room
            window.append(part)
    return window


def split_box(lengths: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `limit` elements; yields where each begins and its lengths.

    A box is cut along its first dimensions, so that each piece is one stretch of the whole.
    """
    if math.prod(lengths) <= limit:
        yield (0,) * len(lengths), lengths
        return
    row = math.prod(lengths[1:])
    if row > limit:
        for index in range(lengths[0]):
            for start, inner in split_box(lengths[1:], limit):
                yield (index, *start), (1, *inner)
        return
    step = limit // row
    for begin in range(0, lengths[0], step):
        rest = (0,) * (len(lengths) - 1)
        yield (begin, *rest), (min(step, lengths[0] - begin), *lengths[1:])
