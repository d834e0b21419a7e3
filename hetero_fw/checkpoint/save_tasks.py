"""The pieces of work that touch storage. Plain data, run by an `Executor` wherever that runs."""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hetero_fw.checkpoint.commit import SaveSpec
from hetero_fw.checkpoint.manifest import Manifest
from hetero_fw.checkpoint.place import Place
from hetero_fw.checkpoint.pruning import Decide, PruneReport
from hetero_fw.checkpoint.read_back import NOTHING_READ, Intact
from hetero_fw.checkpoint.retrying import retry_storage
from hetero_fw.checkpoint.save_point import OnPoint, SavePoint
from hetero_fw.checkpoint.shard_file import PIECE_BYTES, WrittenShard
from hetero_fw.checkpoint.shard_layout import ShardLayout
from hetero_fw.checkpoint.staging import first_non_finite
from hetero_fw.errors import CheckpointError
from hetero_fw.policies import RetentionRule, decide_retention

OnProgress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class WritePart:
    """Write this rank's shard.

    Attributes:
        source: file with the bytes; None: they are in the staging memory.
        expected: what the file in `source` was when it was written.
        may_be_infinite: as `first_non_finite` takes it; None: the bytes were checked before.
        time_left_s: when to stop trying again.
    """

    place: Place
    spec: SaveSpec
    layout: ShardLayout
    source: Path | None = None
    expected: WrittenShard | None = None
    may_be_infinite: frozenset[str] | None = None
    time_left_s: float = 0.0

    def __call__(self, content: memoryview, on_progress: OnProgress) -> WrittenShard:
        """Returns what was written.

        Raises:
            CheckpointError: a value is not finite, `source` has changed, or the storage refuses it.
        """
        with _bytes_of(self.source, self.layout.size, content) as source:
            if self.may_be_infinite is not None:
                culprit = first_non_finite(source, self.layout, self.may_be_infinite)
                if culprit is not None:
                    raise CheckpointError(f"{culprit} is not finite")

            def write() -> WrittenShard:
                # Each try writes everything, and counts from nothing.
                on_point = _Counting(self.spec.on_point, on_progress)
                spec = replace(self.spec, on_point=on_point)
                return self.place.write_shard(spec, source, self.layout)

            written = retry_storage(
                write,
                time_left_s=self.time_left_s,
                needed_bytes=self.layout.size,
                free_bytes=self.place.free_bytes,
            )
        if self.expected not in (None, written):
            raise CheckpointError(f"{self.source}: is damaged; it does not hold what was written")
        return written


class _Counting:
    """Counts the pieces of a shard as they are passed."""

    def __init__(self, on_point: OnPoint, on_progress: OnProgress) -> None:
        self._on_point = on_point
        self._on_progress = on_progress
        self._num_pieces = 0

    def __call__(self, point: SavePoint) -> None:
        if point is SavePoint.SHARD_PIECE:
            self._on_progress(self._num_pieces * PIECE_BYTES)
            self._num_pieces += 1
        self._on_point(point)


@dataclass(frozen=True, kw_only=True)
class Publish:
    """Make the checkpoint exist in a place."""

    place: Place
    spec: SaveSpec
    manifest: Manifest
    time_left_s: float

    def __call__(self, content: memoryview, on_progress: OnProgress) -> None:
        """Publishes it.

        Raises:
            CheckpointError: the storage refuses it.
        """

        def on_point(point: SavePoint) -> None:
            on_progress(0)  # raises where the save was given up meanwhile
            self.spec.on_point(point)

        spec = replace(self.spec, on_point=on_point)
        retry_storage(
            lambda: self.place.publish(spec, self.manifest),
            time_left_s=self.time_left_s,
            free_bytes=self.place.free_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Discard:
    """Remove this rank's part of a save that failed.

    Attributes:
        manifest: what this rank has begun to publish. It may be there, whatever was said of it.
    """

    place: Place
    spec: SaveSpec
    file_name: str
    manifest: Manifest | None = None

    def __call__(self, content: memoryview, on_progress: OnProgress) -> None:
        try:
            if self.manifest is not None:
                self.place.withdraw(self.spec, self.manifest)
        finally:
            self.place.discard(self.spec, self.file_name)


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Delete what retention gives up, or `decide` in its stead.

    Attributes:
        read_s: about how long to read back what is not verified yet, in this call.
    """

    place: Place
    prefix: str
    rule: RetentionRule
    on_point: OnPoint
    intact: Intact = NOTHING_READ
    read_s: float = math.inf
    decide: Decide = decide_retention

    def __call__(self, content: memoryview, on_progress: OnProgress) -> PruneReport:
        ends_s = math.inf

        def go_on() -> bool:
            nonlocal ends_s
            on_progress(0)  # raises where it was given up meanwhile
            now_s = time.monotonic()
            ends_s = min(ends_s, now_s + self.read_s)  # counted from the first piece
            return now_s < ends_s

        def at_point(point: SavePoint) -> None:
            on_progress(0)  # as above, before each deletion
            self.on_point(point)

        return self.place.prune(
            self.prefix,
            self.rule,
            intact=self.intact,
            go_on=go_on,
            on_point=at_point,
            decide=self.decide,
        )


@dataclass(frozen=True, kw_only=True)
class FencedBy:
    """Which later attempt has taken a place over."""

    place: Place

    def __call__(self, content: memoryview, on_progress: OnProgress) -> int | None:
        return self.place.fenced_by()


@dataclass(frozen=True, kw_only=True)
class Remake:
    """Make a place again that is gone."""

    place: Place

    def __call__(self, content: memoryview, on_progress: OnProgress) -> bool:
        return self.place.remake()


@contextmanager
def _bytes_of(source: Path | None, size: int, content: memoryview) -> Iterator[memoryview]:
    if source is None or size == 0:
        yield content
        return
    with source.open("rb") as file:
        if (found := os.fstat(file.fileno()).st_size) != size:
            raise CheckpointError(f"{source}: is damaged; {found} of {size} bytes are there")
        # A private copy on write: PyTorch wants memory that it could write to.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    yield memoryview(mapped)
