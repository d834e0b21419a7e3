"""Read a checkpoint with all ranks, window by window, and hand each on once it is verified."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from hetero_fw.checkpoint.assignment import Holder
from hetero_fw.checkpoint.buffer import Buffer
from hetero_fw.checkpoint.delivery import Delivery
from hetero_fw.checkpoint.reading import ReadRequest, ReadResult, SpanReader
from hetero_fw.checkpoint.shard_layout import ALIGNMENT_BYTES
from hetero_fw.checkpoint.spans import ChunkKey, Span, find_spans
from hetero_fw.checkpoint.whereabouts import Whereabouts

# What a rank keeps for the others before the ranks tell each other. More gains nothing, and takes
# memory. What only the reader itself wants is not kept.
WINDOW_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Filled:
    """What it took to fill the tensors; the same on all ranks, but for `own_bytes`.

    Attributes:
        sources: the directories that bytes came from, nearest first.
        tiers: names of the tiers of these.
        bytes_read: bytes of chunks that all ranks together read, failed tries included.
        own_bytes: how many of these this rank read.
        size_bytes: bytes of the tensors that were read.
        read_s: time that it took.
    """

    sources: tuple[str, ...]
    tiers: tuple[str, ...]
    bytes_read: int
    own_bytes: int
    size_bytes: int
    read_s: float


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What one rank has read in a window."""

    num_bytes: int
    failures: tuple[ReadResult, ...]


class Filling:
    """One checkpoint on its way from the files into tensors; all ranks do the same.

    What a rank has read and verified goes into its own tensors at once. Beside the tensors there is
    the memory of one span and one window, used again for each.
    """

    def __init__(
        self, whereabouts: Whereabouts, names: Collection[str], delivery: Delivery
    ) -> None:
        self._where = whereabouts
        self._ranks = whereabouts.ranks
        self._delivery = delivery
        self._spans = find_spans(whereabouts.manifest, names, num_readers=self._ranks.size)
        self._pending = dict.fromkeys(range(len(self._spans)))
        self._queues: list[deque[tuple[int, Holder]]] = []
        self._reader = SpanReader()
        self._buffer = Buffer()
        self._used: dict[Holder, None] = {}
        self._bytes_read = self._own_bytes = 0
        self._began_s = time.perf_counter()

    def run(self) -> None:
        """Fill the tensors; returns early if some bytes are nowhere as they were written."""
        self._assign()
        while self._pending and not self._where.is_hopeless:
            self._fill_window(self._next_window())
        self._delivery.finish()

    def _assign(self) -> None:
        """Share out what was not delivered yet."""
        numbers = list(self._pending)
        self._queues = [deque() for _ in range(self._ranks.size)]
        holders = self._where.assign([self._spans[number] for number in numbers])
        for number, holder in zip(numbers, holders, strict=True):
            if holder is not None:
                self._queues[holder.rank].append((number, holder))

    def _next_window(self) -> dict[int, Holder]:
        """Of each rank the next spans, as far as those fit that it must keep for other ranks."""
        window: dict[int, Holder] = {}
        for queue in self._queues:
            size = 0
            while queue:
                number, holder = queue[0]
                room = self._room(number) if self._is_shared(number, holder) else 0
                if size and size + room > WINDOW_BYTES:
                    break
                size += room
                window[number] = holder
                queue.popleft()
        return window

    def _is_shared(self, number: int, holder: Holder) -> bool:
        """Whether other ranks than the reader want something of a span."""
        chunks = self._spans[number].chunks
        return not all(self._delivery.stays(chunk.key, holder.rank) for chunk in chunks)

    def _room(self, number: int) -> int:
        """Bytes that a span takes in memory, so that the next one can be viewed as its dtype."""
        return -(-self._spans[number].size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def _fill_window(self, window: Mapping[int, Holder]) -> None:
        mine = {n: holder for n, holder in window.items() if holder.rank == self._ranks.rank}
        kept = self._memory_for([n for n, holder in mine.items() if self._is_shared(n, holder)])
        results = self._reader.read([self._request(n, h, kept.get(n)) for n, h in mine.items()])
        own = _Report(
            num_bytes=sum(self._spans[number].num_chunk_bytes for number in mine),
            failures=tuple(result for result in results if result.problem),
        )
        self._own_bytes += own.num_bytes
        reports = self._ranks.gather(own)
        self._bytes_read += sum(report.num_bytes for report in reports)
        failures = {failure.number: failure for report in reports for failure in report.failures}
        self._exchange({n: h for n, h in window.items() if n not in failures}, kept)
        for number, failure in failures.items():
            self._where.drop(window[number], self._spans[number].file, failure)
        if failures:
            self._assign()

    def _memory_for(self, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
        memory = self._buffer.take(sum(self._room(number) for number in numbers))
        rooms, end = {}, 0
        for number in numbers:
            rooms[number] = memory[end : end + self._spans[number].size]
            end += self._room(number)
        return rooms

    def _request(self, number: int, holder: Holder, memory: torch.Tensor | None) -> ReadRequest:
        source = self._where.sources[holder.source]
        return ReadRequest(
            number=number,
            span=self._spans[number],
            directory=source.directory,
            patience_s=source.patience_s,
            memory=memory,
            on_read=self._copy_here,
        )

    def _copy_here(self, span: Span, content: torch.Tensor) -> None:
        for key, part in _chunks_in(span, content).items():
            self._delivery.copy_here(key, part)

    def _exchange(self, window: Mapping[int, Holder], kept: Mapping[int, torch.Tensor]) -> None:
        owners: dict[ChunkKey, int] = {}
        contents: dict[ChunkKey, torch.Tensor] = {}
        for number, holder in window.items():
            span = self._spans[number]
            if self._is_shared(number, holder):
                owners |= {chunk.key: holder.rank for chunk in span.chunks}
            if number in kept:
                contents |= _chunks_in(span, kept[number])
            self._used[holder] = None
            del self._pending[number]
        self._delivery.exchange(owners, contents)

    def result(self) -> Filled:
        """What it took so far."""
        used = sorted(
            (self._where.facts_of(holder) for holder in self._used),
            key=lambda facts: (facts.distance, facts.directory),
        )
        return Filled(
            sources=tuple(dict.fromkeys(facts.directory for facts in used)),
            tiers=tuple(dict.fromkeys(facts.tier for facts in used)),
            bytes_read=self._bytes_read,
            own_bytes=self._own_bytes,
            size_bytes=sum(span.num_chunk_bytes for span in self._spans),
            read_s=time.perf_counter() - self._began_s,
        )


def _chunks_in(span: Span, content: torch.Tensor) -> dict[ChunkKey, torch.Tensor]:
    return {
        chunk.key: content[chunk.start : chunk.start + chunk.entry.length] for chunk in span.chunks
    }
