"""How ranks tell each other, without a collective, whether a save became a checkpoint.

Every rank posts a report about its shard under a key of the store; rank 0 collects them, publishes
or gives up, and announces one verdict. All waits are bounded, none blocks the store for others.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain

from torch.distributed.distributed_c10d import Store

from hetero_fw.checkpoint.rank_store import RankStore
from hetero_fw.checkpoint.shard_file import WrittenShard
from hetero_fw.errors import CheckpointError


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
        is_again: it failed, and all ranks try it once more, as `again` names it.
    """

    is_committed: bool
    reason: str
    stall_s: float = 0.0
    size_bytes: int = 0
    is_again: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Verdict:
        return cls(**json.loads(text))


def again(save: str) -> str:
    """Name of the second try of a save."""
    return f"{save}-again"


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
        self._store = RankStore(store, world_size=world_size)
        self._rank = rank
        self._world_size = world_size
        self._topics = tuple(topics)
        self._announced: dict[int, list[str]] = {}
        self._announced_lock = threading.Lock()

    def cancel(self) -> None:
        """Make every wait, now and later, end with an error."""
        self._store.cancel()

    def post(self, save: str, report: ShardReport) -> None:
        """Tell rank 0 about this rank's shard."""
        if report.error is not None:
            # The first one: what fails after it fails because of it.
            self._store.set_first(_failed_key(save), report.to_json())
            self._store.set(_ended_key(save), "")
        self._store.set(_report_key(save, self._rank), report.to_json())

    def collect(self, save: str, deadline_s: float) -> tuple[ShardReport, ...]:
        """Rank 0: wait for all reports, or for the first error.

        Raises:
            CheckpointError: a rank failed or did not report in time. Names it.
        """
        keys = [_report_key(save, rank) for rank in range(self._world_size)]
        failed = _failed_key(save)
        if not self._store.wait(keys, deadline_s, or_key=failed):
            missing = [rank for rank, key in enumerate(keys) if not self._store.has([key])]
            raise CheckpointError(f"no report from ranks {missing} in time")
        if self._store.has([failed]):
            report = ShardReport.from_json(self._store.get(failed))
            raise CheckpointError(f"rank {report.rank}: {report.error}")
        return tuple(ShardReport.from_json(self._store.get(key)) for key in keys)

    def announce(self, save: str, verdict: Verdict, *, sequence: int) -> None:
        """Rank 0: tell all ranks; forget what everybody has read by now."""
        self._store.set(_verdict_key(save), verdict.to_json())
        if not verdict.is_committed:
            self._store.set(_ended_key(save), "")
        with self._announced_lock:
            self._announced.setdefault(sequence, []).append(save)
            # If every rank took part in this save, every rank is done with those before it.
            read = [earlier for earlier in self._announced if earlier < sequence]
            names = [self._announced.pop(earlier) for earlier in read if verdict.is_committed]
        for name in chain.from_iterable(names):
            self._forget(name)

    def await_verdict(self, save: str, deadline_s: float) -> Verdict:
        """Other ranks: wait for rank 0's verdict."""
        key = _verdict_key(save)
        if not self._store.wait([key], deadline_s):
            raise CheckpointError("no verdict from rank 0 in time")
        return Verdict.from_json(self._store.get(key))

    def verdict(self, save: str) -> Verdict | None:
        """Rank 0's last verdict, if it is there: until every rank took part in a later save."""
        key = _verdict_key(save)
        if not self._store.has([key]):
            return None
        verdict = Verdict.from_json(self._store.get(key))
        return self.verdict(again(save)) if verdict.is_again else verdict

    def tell(self, save: str, topic: str, text: str) -> None:
        """Leave word for other ranks about a save."""
        self._store.set(_topic_key(save, topic), text)

    def hear(self, save: str, topic: str, deadline_s: float) -> str:
        """Wait for what another rank tells.

        Raises:
            CheckpointError: it did not come in time, or the save was given up meanwhile.
        """
        key = _topic_key(save, topic)
        if not self._store.wait([key], deadline_s, or_key=_ended_key(save)):
            raise CheckpointError(f"no word of {topic} in time")
        if not self._store.has([key]):
            raise CheckpointError("another rank has given the save up")
        return self._store.get(key).decode()

    def _forget(self, save: str) -> None:
        keys = [_report_key(save, rank) for rank in range(self._world_size)]
        topics = [_topic_key(save, topic) for topic in self._topics]
        for key in (*keys, *topics, _failed_key(save), _ended_key(save), _verdict_key(save)):
            self._store.delete(key)


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
