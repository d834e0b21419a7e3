"""How ranks tell each other, without a collective, whether a save became a checkpoint.

Every rank posts a report about its shard under a key of the store; rank 0 collects them, publishes
or gives up, and announces one verdict. All waits are bounded, none blocks the store for others.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch.distributed import HashStore
from torch.distributed.distributed_c10d import Store

from hetero_fw.checkpoint.shard_file import WrittenShard
from hetero_fw.errors import CheckpointError

POLL_MIN_S = 0.001
POLL_MAX_S = 0.05


@dataclass(frozen=True, kw_only=True)
class ShardReport:
    """What one rank says about its part of a save: a written shard or an error."""

    rank: int
    stall_s: float = 0.0
    shard: WrittenShard | None = None
    error: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> ShardReport:
        data = json.loads(text)
        shard = data.pop("shard")
        if shard is not None:
            shard = WrittenShard(**{**shard, "chunk_digests": tuple(shard["chunk_digests"])})
        return cls(**data, shard=shard)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a save, the same on every rank.

    Attributes:
        reason: why it was made, or why it failed.
        stall_s: the longest time that any rank's training stood still for it.
    """

    is_committed: bool
    reason: str
    stall_s: float = 0.0
    size_bytes: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Verdict:
        return cls(**json.loads(text))


class VerdictBoard:
    """The store keys of the saves of one attempt.

    Args:
        store: seen by all ranks; None for a single rank.
        topics: what ranks `tell` each other about each save.

    A save is addressed by a name that is the same on all ranks and unlike any other save's.
    Methods raise CheckpointError when the store is lost or the board was cancelled.
    """

    def __init__(
        self, store: Store | None, *, rank: int, world_size: int, topics: Sequence[str] = ()
    ) -> None:
        assert store is not None or world_size == 1, "several ranks need a store"
        # Kept, because the process that serves a store stops serving when it is dropped.
        self._original = store or HashStore()
        # A connection of its own: a TCPStore client serves one caller at a time.
        self._store: Store = self._original.clone()  # type: ignore[attr-defined]  # stub
        self._rank = rank
        self._world_size = world_size
        self._topics = tuple(topics)
        self._cancelled = threading.Event()
        self._announced: dict[int, str] = {}
        self._announced_lock = threading.Lock()

    def cancel(self) -> None:
        """Make every wait, now and later, end with an error."""
        self._cancelled.set()

    def post(self, save: str, report: ShardReport) -> None:
        """Tell rank 0 about this rank's shard."""
        if report.error is not None:
            # The first one: what fails after it fails because of it.
            self._call("compare_set", _failed_key(save), "", report.to_json())
            self._set(_ended_key(save), "")
        self._set(_report_key(save, self._rank), report.to_json())

    def collect(self, save: str, deadline_s: float) -> tuple[ShardReport, ...]:
        """Rank 0: wait for all reports, or for the first error.

        Raises:
            CheckpointError: a rank failed or did not report in time. Names it.
        """
        keys = [_report_key(save, rank) for rank in range(self._world_size)]
        failed = _failed_key(save)
        if not self._wait(keys, deadline_s, or_key=failed):
            missing = [rank for rank, key in enumerate(keys) if not self._has([key])]
            raise CheckpointError(f"no report from ranks {missing} in time")
        if self._has([failed]):
            report = ShardReport.from_json(self._get(failed))
            raise CheckpointError(f"rank {report.rank}: {report.error}")
        return tuple(ShardReport.from_json(self._get(key)) for key in keys)

    def announce(self, save: str, verdict: Verdict, *, sequence: int) -> None:
        """Rank 0: tell all ranks; forget what everybody has read by now."""
        self._set(_verdict_key(save), verdict.to_json())
        if not verdict.is_committed:
            self._set(_ended_key(save), "")
        with self._announced_lock:
            self._announced[sequence] = save
            # If every rank took part in this save, every rank is done with those before it.
            read = [earlier for earlier in self._announced if earlier < sequence]
            names = [self._announced.pop(earlier) for earlier in read if verdict.is_committed]
        for name in names:
            self._forget(name)

    def await_verdict(self, save: str, deadline_s: float) -> Verdict:
        """Other ranks: wait for rank 0's verdict."""
        key = _verdict_key(save)
        if not self._wait([key], deadline_s):
            raise CheckpointError("no verdict from rank 0 in time")
        return Verdict.from_json(self._get(key))

    def tell(self, save: str, topic: str, text: str) -> None:
        """Leave word for other ranks about a save."""
        self._set(_topic_key(save, topic), text)

    def hear(self, save: str, topic: str, deadline_s: float) -> str:
        """Wait for what another rank tells.

        Raises:
            CheckpointError: it did not come in time, or the save was given up meanwhile.
        """
        key = _topic_key(save, topic)
        if not self._wait([key], deadline_s, or_key=_ended_key(save)):
            raise CheckpointError(f"no word of {topic} in time")
        if not self._has([key]):
            raise CheckpointError("another rank has given the save up")
        return self._get(key).decode()

    def _wait(self, keys: list[str], deadline_s: float, or_key: str | None = None) -> bool:
        pause_s = POLL_MIN_S
        while not self._has(keys) and not (or_key is not None and self._has([or_key])):
            if time.monotonic() > deadline_s:
                return False
            if self._cancelled.wait(pause_s):
                raise CheckpointError("the saver was closed before the save was complete")
            pause_s = min(2 * pause_s, POLL_MAX_S)
        return True

    def _forget(self, save: str) -> None:
        keys = [_report_key(save, rank) for rank in range(self._world_size)]
        topics = [_topic_key(save, topic) for topic in self._topics]
        for key in (*keys, *topics, _failed_key(save), _ended_key(save), _verdict_key(save)):
            self._call("delete_key", key)

    def _has(self, keys: list[str]) -> bool:
        return bool(self._call("check", keys))

    def _get(self, key: str) -> bytes:
        value = self._call("get", key)
        assert isinstance(value, bytes)
        return value

    def _set(self, key: str, value: str) -> None:
        self._call("set", key, value)

    def _call(self, method: str, *arguments: object) -> object:
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as error:  # every error of a store is one
            raise CheckpointError(f"the store of the ranks is lost: {error}") from error


def _report_key(save: str, rank: int) -> str:
    return f"checkpoint/{save}/report/{rank}"


def _failed_key(save: str) -> str:
    return f"checkpoint/{save}/failed"


def _verdict_key(save: str) -> str:
    return f"checkpoint/{save}/verdict"


def _ended_key(save: str) -> str:
    return f"checkpoint/{save}/ended"


def _topic_key(save: str, topic: str) -> str:
    return f"checkpoint/{save}/topic/{topic}"
