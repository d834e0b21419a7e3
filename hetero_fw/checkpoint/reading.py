"""Read spans of shard files into host memory, each byte once and verified as it comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash

from hetero_fw.checkpoint.sources import unreadable
from hetero_fw.checkpoint.spans import Span
from hetero_fw.errors import CheckpointError

# A piece is hashed while the processor's cache still holds it.
PIECE_BYTES = 2**20
# Reading and hashing release the interpreter lock. More threads than this gain nothing.
MAX_THREADS = 4


class DamagedBytesError(CheckpointError):
    """A file was read, and what came is not what was written."""


@dataclass(frozen=True, kw_only=True)
class ReadRequest:
    """One span, and the directory to read it from: a path or whatever is like one."""

    number: int
    span: Span
    directory: Any


@dataclass(frozen=True, kw_only=True)
class ReadResult:
    """What became of a request.

    Attributes:
        content: the verified bytes; None if that failed.
        problem: why it failed, naming the file.
        is_damaged: the bytes were there and wrong; else they could not be read.
    """

    number: int
    content: torch.Tensor | None
    problem: str = ""
    is_damaged: bool = False


def read_spans(requests: Sequence[ReadRequest]) -> list[ReadResult]:
    """Read all of them, whatever fails."""
    # As many as this rank may use: on a host with as many ranks as cores that is one.
    num_threads = min(MAX_THREADS, torch.get_num_threads(), len(requests))
    if num_threads <= 1:
        return [_read(request) for request in requests]
    with ThreadPoolExecutor(num_threads, thread_name_prefix="checkpoint-reader") as pool:
        return list(pool.map(_read, requests))


def _read(request: ReadRequest) -> ReadResult:
    try:
        content = read_span(request.directory, request.span)
    except DamagedBytesError as error:
        return ReadResult(number=request.number, content=None, problem=str(error), is_damaged=True)
    except Exception as error:  # noqa: BLE001  # a thread's end; stores raise what they like
        path = request.directory / request.span.file
        return ReadResult(number=request.number, content=None, problem=unreadable(path, error))
    return ReadResult(number=request.number, content=content)


def read_span(directory: Any, span: Span) -> torch.Tensor:
    """The bytes of `span`, after every chunk in it was compared with its hash.

    Raises:
        DamagedBytesError: they are not those that were written. Names file and place.
        OSError: the storage refuses.
    """
    path = directory / span.file
    # numpy asks for huge pages, which cost a fraction of the page faults; torch does not.
    memory = np.empty(span.size, dtype=np.uint8)
    window = memory.data
    check = _ChunkCheck(path, span)
    for end in _fill(path, span, window):
        check.advance(window, end)
    return torch.from_numpy(memory)


class _ChunkCheck:
    """Hashes the chunks of a span as far as it was read."""

    def __init__(self, path: Any, span: Span) -> None:
        self._path = path
        self._span = span
        self._rest = iter(span.chunks)
        self._chunk = next(self._rest, None)
        self._digest = xxhash.xxh3_128()
        self._done = 0

    def advance(self, window: memoryview, end: int) -> None:
        while self._chunk is not None:
            stop = self._chunk.start + self._chunk.entry.length
            begin = max(self._chunk.start, self._done)
            if begin < end:
                self._digest.update(window[begin : min(stop, end)])
            self._done = min(stop, end)
            if stop > end:
                return
            self._compare()

    def _compare(self) -> None:
        assert self._chunk is not None
        entry = self._chunk.entry
        if self._digest.hexdigest() != entry.xxh3_128:
            raise DamagedBytesError(
                f"{self._path}: bytes {entry.byte_offset} to {entry.byte_offset + entry.length} "
                "are not those that were written (xxh3_128)"
            )
        self._digest.reset()
        self._chunk = next(self._rest, None)


def _fill(path: Any, span: Span, window: memoryview) -> Iterator[int]:
    """Read the span into `window`, piece by piece; yields how many bytes are there."""
    done = 0
    # Files of this machine take bytes straight into memory; those of other stores may not.
    is_local = type(path) is type(Path())
    with path.open("rb", buffering=0) if is_local else path.open("rb") as file:
        file.seek(span.begin)
        pieces = _pieces_into(file, window) if is_local else _pieces_of(file, window)
        for count in pieces:
            if not count:
                raise DamagedBytesError(f"{path}: ends before byte {span.end}")
            done += count
            yield done


def _pieces_into(file: Any, window: memoryview) -> Iterator[int]:
    done = 0
    while done < len(window):
        count = file.readinto(window[done : done + PIECE_BYTES])
        yield count
        done += count


def _pieces_of(file: BinaryIO, window: memoryview) -> Iterator[int]:
    done = 0
    while done < len(window):
        piece = file.read(len(window) - done)  # one request, however many the store makes of it
        window[done : done + len(piece)] = piece
        yield len(piece)
        done += len(piece)
