"""A save on its way, and what is safe whatever becomes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hetero_fw.checkpoint.commit import SaveSpec
from hetero_fw.checkpoint.manifest import Manifest
from hetero_fw.checkpoint.save_handle import SaveHandle
from hetero_fw.checkpoint.shard_file import WrittenShard
from hetero_fw.checkpoint.shard_layout import SaveLayout


@dataclass(kw_only=True)
class SaveJob:
    """One save on its way from `save` to its outcome.

    Attributes:
        sequence: number of the `save` call it comes from.
        is_unchanged: whether the tensors are still as they were; asked when all are copied.
        started_at_s: when `save` was called, by the monotonic clock; `staged_at_s` when the
            tensors were free again.
        stall_s: how long this rank's training stood still, as far as it recurs with every save.
        is_staged: set when `staged_at_s` and `error` are final.
        error: why this rank cannot take part, None if it can.
        has_staging: whether the staging memory is this save's.
        written: this rank's part, once it is on the storage.
        source: file with the bytes; None: the staging memory.
        expected: what that file has to hold.
        manifest: what this rank has begun to publish.
        num_bytes_done: of this rank's part.
        storage_hangs: whether clearing up would hang as well.
        retires: whether older checkpoints go once it is published.
        remedy: what was done after it failed so that a save may succeed, in words.
    """

    handle: SaveHandle
    sequence: int
    spec: SaveSpec
    layout: SaveLayout
    may_be_infinite: frozenset[str] | None
    started_at_s: float
    is_unchanged: Callable[[], bool] = lambda: True
    staged_at_s: float = 0.0
    stall_s: float = 0.0
    setup_s: float = 0.0
    postponed_s: float = 0.0
    is_staged: threading.Event = field(default_factory=threading.Event)
    error: str | None = None
    has_staging: bool = False
    written: WrittenShard | None = None
    source: Path | None = None
    expected: WrittenShard | None = None
    manifest: Manifest | None = None
    num_bytes_done: int = 0
    storage_hangs: bool = False
    retires: bool = True
    remedy: str = ""


@dataclass
class SafeStep:
    """The newest step that is published anywhere: what a restart goes on from."""

    step: int | None

    def tell(self, *, is_place_gone: bool = False) -> str:
        """In words. What lay in a place that is gone may be gone with it."""
        if is_place_gone and self.step is not None:
            return f"step {self.step} was safe there until now"
        if self.step is None:
            return "no checkpoint is safe yet, a restart begins at step 0"
        return f"step {self.step} is safe, a restart goes on from it"
