"""What the caller of a save gets back, at once and later."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from hetero_fw.checkpoint.storage import StoragePath
from hetero_fw.policies import Tier


@dataclass(frozen=True, kw_only=True)
class SaveOutcome:
    """How a save ended.

    Attributes:
        tier: which tier of storage it was for.
        ok: the checkpoint is published; `path` is where, None otherwise.
        reason: why it was made, or why it failed.
        stall_s: how long training stood still for it; for a committed asynchronous save the
            longest of all ranks, the same on every rank. What every save costs: without
            `setup_s` and `postponed_s`, which came on top on this rank.
        setup_s: planning and getting memory, in the first save of a structure.
        postponed_s: how long `save` waited on this rank for the save before.
        persist_s: from the end of staging to the verdict.
        size_bytes: bytes of all shards; 0 if it failed.
    """

    step: int
    ok: bool
    reason: str
    stall_s: float
    persist_s: float
    setup_s: float = 0.0
    postponed_s: float = 0.0
    size_bytes: int = 0
    path: StoragePath | None = None
    tier: Tier = Tier.STORAGE


@dataclass(frozen=True, kw_only=True)
class SaveProgress:
    """How far a save is on one rank, in bytes of its shard."""

    step: int
    tier: Tier
    num_bytes: int
    size_bytes: int
    taken_s: float


class SaveHandle:
    """A save that may still be in flight. Its failure is data, never an exception.

    First it is decided, and committed or not. Then it ends, once that is cleared up after: older
    checkpoints may have to be read back before what it made superfluous goes.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._decided = threading.Event()
        self._done = threading.Event()
        self._outcome: SaveOutcome | None = None

    @property
    def is_decided(self) -> bool:
        return self._decided.is_set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    @property
    def outcome(self) -> SaveOutcome | None:
        """The outcome, None while the save is in flight."""
        return self._outcome if self.is_decided else None

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False if that has not come after `timeout_s`."""
        return self._done.wait(timeout_s)

    def wait_for_verdict(self, timeout_s: float) -> bool:
        """Wait for its outcome; False if there is none after `timeout_s`."""
        return self._decided.wait(timeout_s)

    def decide(self, outcome: SaveOutcome) -> None:
        """Called once, by the saver."""
        self._outcome = outcome
        self._decided.set()

    def end(self) -> None:
        """Called after `decide`, by the saver."""
        self._done.set()

    def fail(self, tier: Tier, reason: str, stall_s: float = 0.0) -> None:
        """Called instead of both, for a save that never came to a verdict."""
        self.decide(
            SaveOutcome(
                step=self.step, tier=tier, ok=False, reason=reason, stall_s=stall_s, persist_s=0.0
            )
        )
        self.end()
