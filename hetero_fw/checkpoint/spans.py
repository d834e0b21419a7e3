"""Which bytes of which files a restore needs, as spans that are read in one go."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hetero_fw.checkpoint.hashing import HashAlgorithm
from hetero_fw.checkpoint.manifest import ChunkEntry, Manifest
from hetero_fw.checkpoint.shard_layout import ALIGNMENT_BYTES

# Large enough for storage, small enough to be still in the cache when it is copied to a tensor.
MAX_SPAN_BYTES = 4 * 2**20
MIN_SPAN_BYTES = 2**18
_SPANS_PER_READER = 4

# A chunk by its tensor's name and its place among the tensor's chunks.
ChunkKey = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class SpanChunk:
    """A chunk in a span; it starts `start` bytes after the span does."""

    key: ChunkKey
    start: int
    entry: ChunkEntry


@dataclass(frozen=True, kw_only=True)
class Span:
    """Adjacent chunks of one file, from byte `begin` to before byte `end`, in file order.

    Attributes:
        hash: what the digests of the chunks are made with.
    """

    file: str
    begin: int
    end: int
    chunks: tuple[SpanChunk, ...]
    hash: HashAlgorithm

    @property
    def size(self) -> int:
        """Bytes from the first chunk to the last; padding between chunks included."""
        return self.end - self.begin

    @property
    def num_chunk_bytes(self) -> int:
        return sum(chunk.entry.length for chunk in self.chunks)


def find_spans(
    manifest: Manifest, names: Collection[str], *, num_readers: int = 1
) -> tuple[Span, ...]:
    """The chunks of the tensors `names`, each once, ordered by file and place.

    A chunk is never divided, because its hash is that of the whole; spans of several chunks are
    kept small enough that each of `num_readers` gets a few of them.
    """
    keyed = [
        ((fqn, index), chunk)
        for fqn in names
        for index, chunk in enumerate(manifest.tensors[fqn].chunks)
    ]
    keyed.sort(key=lambda item: (item[1].file, item[1].byte_offset, item[0]))
    total = sum(chunk.length for _, chunk in keyed)
    limit = min(MAX_SPAN_BYTES, max(MIN_SPAN_BYTES, total // (_SPANS_PER_READER * num_readers)))
    spans: list[Span] = []
    run: list[tuple[ChunkKey, ChunkEntry]] = []
    for key, chunk in keyed:
        if run and not _continues(run, chunk, limit):
            spans.append(_span(run, manifest.hash))
            run = []
        run.append((key, chunk))
    return (*spans, _span(run, manifest.hash)) if run else tuple(spans)


def _continues(run: list[tuple[ChunkKey, ChunkEntry]], chunk: ChunkEntry, limit: int) -> bool:
    first, last = run[0][1], run[-1][1]
    gap = chunk.byte_offset - (last.byte_offset + last.length)
    start = chunk.byte_offset - first.byte_offset
    return (
        chunk.file == last.file
        and 0 <= gap < ALIGNMENT_BYTES
        and start % ALIGNMENT_BYTES == 0  # else it could not be viewed as its dtype
        and start + chunk.length <= limit
    )


def _span(run: list[tuple[ChunkKey, ChunkEntry]], algorithm: HashAlgorithm) -> Span:
    begin, last = run[0][1].byte_offset, run[-1][1]
    return Span(
        file=last.file,
        begin=begin,
        end=last.byte_offset + last.length,
        chunks=tuple(
            SpanChunk(key=key, start=chunk.byte_offset - begin, entry=chunk) for key, chunk in run
        ),
        hash=algorithm,
    )
