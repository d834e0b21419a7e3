"""The store of the ranks as saves use it: waits that poll, are bounded and can be cancelled."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from torch.distributed import HashStore
from torch.distributed.distributed_c10d import Store

from hetero_fw.errors import CheckpointError

_POLL_MIN_S = 0.001
_POLL_MAX_S = 0.05


class RankStore:
    """Keys that all ranks see. No wait blocks the store for others.

    Args:
        store: seen by all ranks; None for a single one.

    Methods raise CheckpointError when the store is lost or waits were cancelled.
    """

    def __init__(self, store: Store | None, *, world_size: int) -> None:
        assert store is not None or world_size == 1, "several ranks need a store"
        # Kept, because the process that serves a store stops serving when it is dropped.
        self._original = store or HashStore()
        # A connection of its own: a TCPStore client serves one caller at a time.
        self._store: Store = self._original.clone()  # type: ignore[attr-defined]  # stub
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Make every wait, now and later, end with an error."""
        self._cancelled.set()

    def wait(self, keys: Sequence[str], deadline_s: float, or_key: str | None = None) -> bool:
        """Whether all of `keys`, or `or_key`, came before `deadline_s` of the monotonic clock."""
        pause_s = _POLL_MIN_S
        while not self.has(keys) and not (or_key is not None and self.has([or_key])):
            if time.monotonic() > deadline_s:
                return False
            if self._cancelled.wait(pause_s):
                raise CheckpointError("the saver was closed before the save was complete")
            pause_s = min(2 * pause_s, _POLL_MAX_S)
        return True

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all of `keys` are there."""
        return bool(self._call("check", list(keys)))

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        value = self._call("get", key)
        assert isinstance(value, bytes)
        return value

    def set(self, key: str, value: str) -> None:
        """Write, over what is there."""
        self._call("set", key, value)

    def set_first(self, key: str, value: str) -> bytes:
        """Write if nothing is there; returns what is there then."""
        found = self._call("compare_set", key, "", value)
        assert isinstance(found, bytes)
        return found

    def delete(self, key: str) -> None:
        """Forget a key, also one that is not there."""
        self._call("delete_key", key)

    def _call(self, method: str, *arguments: object) -> object:
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as error:  # every error of a store is one
            raise CheckpointError(f"the store of the ranks is lost: {error}") from error
