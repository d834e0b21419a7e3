"""Read a checkpoint with all ranks, window by window, and hand each on once it is verified."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hetero_fw.checkpoint.assignment import Holder
from hetero_fw.checkpoint.delivery import Delivery
from hetero_fw.checkpoint.reading import ReadRequest, ReadResult, SpanReader
from hetero_fw.checkpoint.shard_layout import ALIGNMENT_BYTES
from hetero_fw.checkpoint.spans import ChunkKey, find_spans
from hetero_fw.checkpoint.whereabouts import Whereabouts

# What a rank reads before the ranks tell each other. More gains nothing, and takes memory.
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

    Beside the tensors there is the memory of one window, used again for each.
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
        self._memory = torch.empty(0, dtype=torch.uint8)
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
        """Of each rank the next spans that fit; one that is larger comes alone."""
        window: dict[int, Holder] = {}
        for queue in self._queues:
            size = 0
            while queue:
                size += self._room(queue[0][0])
                if size > WINDOW_BYTES and size > self._room(queue[0][0]):
                    break
                number, holder = queue.popleft()
                window[number] = holder
        return window

    def _room(self, number: int) -> int:
        """Bytes that a span takes in memory, so that the next one can be viewed as its dtype."""
        return -(-self._spans[number].size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def _fill_window(self, window: Mapping[int, Holder]) -> None:
        mine = [n for n, holder in window.items() if holder.rank == self._ranks.rank]
        results = self._read({number: window[number] for number in mine})
        own = _Report(
            num_bytes=sum(self._spans[number].num_chunk_bytes for number in mine),
            failures=tuple(result for result in results if result.content is None),
        )
        self._own_bytes += own.num_bytes
        reports = self._ranks.gather(own)
        failures = {f.number: f for report in reports for f in report.failures}
        self._bytes_read += sum(report.num_bytes for report in reports)
        self._deliver({n: h for n, h in window.items() if n not in failures}, results)
        for number, failure in failures.items():
            self._where.drop(window[number], self._spans[number].file, failure)
        if failures:
            self._assign()

    def _read(self, window: Mapping[int, Holder]) -> list[ReadResult]:
        size = sum(self._room(number) for number in window)
        if size > len(self._memory):
            # numpy asks for huge pages, which cost a fraction of the page faults; torch does not.
            self._memory = torch.from_numpy(np.empty(size, dtype=np.uint8))
        requests, end = [], 0
        for number, holder in window.items():
            source, span = self._where.sources[holder.source], self._spans[number]
            requests.append(
                ReadRequest(
                    number=number,
                    span=span,
                    directory=source.directory,
                    patience_s=source.patience_s,
                    memory=self._memory[end : end + span.size],
                )
            )
            end += self._room(number)
        return self._reader.read(requests)

    def _deliver(self, window: Mapping[int, Holder], results: Collection[ReadResult]) -> None:
        owners: dict[ChunkKey, int] = {}
        for number, holder in window.items():
            owners |= {chunk.key: holder.rank for chunk in self._spans[number].chunks}
            self._used[holder] = None
            del self._pending[number]
        contents: dict[ChunkKey, torch.Tensor] = {}
        for result in results:
            if result.content is not None:
                for chunk in self._spans[result.number].chunks:
                    end = chunk.start + chunk.entry.length
                    contents[chunk.key] = result.content[chunk.start : end]
        self._delivery.deliver(owners, contents)

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
