"""Read spans of shard files into host memory, each byte once and verified as it comes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from upath import UPath

from hetero_fw.checkpoint.buffer import Buffer
from hetero_fw.checkpoint.hashing import new_hasher
from hetero_fw.checkpoint.sources import may_be_intact, patiently, unreadable
from hetero_fw.checkpoint.spans import Span
from hetero_fw.checkpoint.storage import (
    NUM_PIECES_AHEAD,
    StoragePath,
    is_object_store,
    open_regular,
    read_ranges,
)
from hetero_fw.checkpoint.storage import PIECE_BYTES as RANGE_BYTES
from hetero_fw.errors import CheckpointError

# A piece is hashed while the processor's cache still holds it.
PIECE_BYTES = 2**20
# Reading and hashing release the interpreter lock. More threads than this gain nothing.
MAX_THREADS = 4
# So many wait for answers of a remote storage, that share the ranges which are on their way.
NUM_REMOTE_THREADS = 4


class DamagedBytesError(CheckpointError):
    """A file was read, and what came is not what was written."""


@dataclass(frozen=True, kw_only=True)
class ReadRequest:
    """One span, and the directory to read it from.

    Attributes:
        patience_s: how long to try again what the storage does not answer properly.
        memory: where the bytes go; None if they are needed for `on_read` only.
        on_read: called with the verified bytes, in the thread that has read them; must not raise.
    """

    number: int
    span: Span
    directory: StoragePath
    patience_s: float
    memory: torch.Tensor | None
    on_read: Callable[[Span, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class ReadResult:
    """What became of a request.

    Attributes:
        problem: why it failed, naming the file; "" if it did not.
        is_damaged: the bytes were there and wrong; else they could not be read.
        is_silent: the storage did not answer properly, which says nothing of the bytes.
    """

    number: int
    problem: str = ""
    is_damaged: bool = False
    is_silent: bool = False


class SpanReader:
    """Reads spans in several threads, none any more from a storage that has fallen silent."""

    def __init__(self) -> None:
        self._silent: dict[str, str] = {}
        self._scratch = _Scratch()

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        """Read all of them, whatever fails."""
        num_threads = min(len(requests), *map(_num_threads, requests)) if requests else 0
        read = functools.partial(self._read, num_ranges=NUM_PIECES_AHEAD // max(1, num_threads))
        if num_threads <= 1:
            return [read(request) for request in requests]
        with ThreadPoolExecutor(num_threads, thread_name_prefix="checkpoint-reader") as pool:
            return list(pool.map(read, requests))

    def _read(self, request: ReadRequest, *, num_ranges: int) -> ReadResult:
        number, place = request.number, str(request.directory)
        path = request.directory / request.span.file
        try:
            if place in self._silent:  # its patience was spent once
                problem = self._silent[place]
                return ReadResult(number=number, problem=problem, is_silent=True)
            memory = request.memory
            if memory is None:
                memory = self._scratch.take(request.span.size)
            _read_span(request, memory, num_ranges)
        except DamagedBytesError as error:
            return ReadResult(number=number, problem=str(error), is_damaged=True)
        except Exception as error:  # noqa: BLE001  # a thread's end; stores raise what they like
            problem = unreadable(path, error)
            is_silent = may_be_intact(path, error)
            if is_silent:
                self._silent[place] = problem
            return ReadResult(number=number, problem=problem, is_silent=is_silent)
        request.on_read(request.span, memory)
        return ReadResult(number=number)


class _Scratch(threading.local):
    """A buffer for each thread, used again, so that it is touched once and stays in the cache."""

    def __init__(self) -> None:
        self._buffer = Buffer()

    def take(self, size: int) -> torch.Tensor:
        return self._buffer.take(size)


def _num_threads(request: ReadRequest) -> int:
    if not is_object_store(request.directory):
        # On a host with as many ranks as cores that is one.
        return min(MAX_THREADS, torch.get_num_threads())
    # Only clients that run on fsspec's event loop are made for several threads.
    return NUM_REMOTE_THREADS if request.directory.fs.async_impl else 1


def _read_span(request: ReadRequest, memory: torch.Tensor, num_ranges: int) -> None:
    """Read a span and compare every chunk in it with its hash.

    Args:
        request: what to read.
        memory: where the bytes go; as many as the span has.
        num_ranges: how many pieces to have a remote storage send at once.

    Raises:
        DamagedBytesError: they are not those that were written. Names file and place.
        CheckpointError: the storage does not answer properly.
        OSError: a local one refuses; StorageError: a remote one.
    """
    path, span = request.directory / request.span.file, request.span
    window = memory.numpy().data
    if is_object_store(path):
        _fill(path, span, window, _received(path, span, window, request.patience_s, num_ranges))
    else:
        local = path
        patiently(
            local,
            lambda: _fill(local, span, window, _read_into(local, span, window)),
            request.patience_s,
        )


class _ChunkCheck:
    """Hashes the chunks of a span as far as it was read."""

    def __init__(self, path: StoragePath, span: Span) -> None:
        self._path = path
        self._span = span
        self._rest = iter(span.chunks)
        self._chunk = next(self._rest, None)
        self._hasher = new_hasher(span.hash)
        self._done = 0

    def advance(self, window: memoryview, end: int) -> None:
        while self._chunk is not None:
            stop = self._chunk.start + self._chunk.entry.length
            begin = max(self._chunk.start, self._done)
            if begin < end:
                self._hasher.update(window[begin : min(stop, end)])
            self._done = min(stop, end)
            if stop > end:
                return
            self._compare()

    def _compare(self) -> None:
        assert self._chunk is not None
        entry = self._chunk.entry
        if self._hasher.hexdigest() != entry.digest:
            raise DamagedBytesError(
                f"{self._path}: bytes {entry.byte_offset} to {entry.byte_offset + entry.length} "
                f"are not those that were written ({self._span.hash})"
            )
        self._hasher = new_hasher(self._span.hash)
        self._chunk = next(self._rest, None)


def _fill(path: StoragePath, span: Span, window: memoryview, counts: Iterator[int]) -> None:
    """Verify the bytes that come into `window`, in pieces of `counts` bytes, as they come."""
    check = _ChunkCheck(path, span)
    done = 0
    for count in counts:
        if not count:
            raise DamagedBytesError(f"{path}: ends before byte {span.end}")
        done += count
        check.advance(window, done)


def _read_into(path: Path, span: Span, window: memoryview) -> Iterator[int]:
    done = 0
    with open_regular(path) as file:
        file.seek(span.begin)
        while done < len(window):
            count = file.readinto(window[done : done + PIECE_BYTES])
            yield count
            done += count


def _received(
    path: UPath, span: Span, window: memoryview, patience_s: float, num_ranges: int
) -> Iterator[int]:
    """Fetch some ranges side by side, then the next; beside `window` no more is in memory."""
    for first in range(0, len(window), num_ranges * RANGE_BYTES):
        last = min(first + num_ranges * RANGE_BYTES, len(window))
        starts = range(first, last, RANGE_BYTES)
        ends = [min(start + RANGE_BYTES, last) for start in starts]
        pieces = patiently(
            path,
            functools.partial(
                read_ranges,
                path,
                [span.begin + start for start in starts],
                [span.begin + end for end in ends],
            ),
            patience_s,
        )
        for start, end, piece in zip(starts, ends, pieces, strict=True):
            if len(piece) != end - start:
                yield 0
                return
            window[start:end] = piece
            yield len(piece)
