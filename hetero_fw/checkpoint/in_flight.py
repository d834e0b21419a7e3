"""The saves of one rank that have not ended, or whose end nobody has been told of."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from hetero_fw.checkpoint.save_handle import SaveHandle, SaveOutcome
from hetero_fw.policies import Tier


class SavesInFlight:
    """What was started, to which tier, and how it ended. Used by one thread."""

    def __init__(self) -> None:
        self._running: list[tuple[Tier, SaveHandle]] = []
        self._unreported: list[SaveHandle] = []

    def started(self, tier: Tier, handle: SaveHandle) -> None:
        """A save to `tier` is on its way, or is about to be."""
        self._running.append((tier, handle))
        self._unreported.append(handle)

    def tiers(self) -> frozenset[Tier]:
        """Those that a save is on its way to."""
        self._running = [(tier, handle) for tier, handle in self._running if not handle.is_done]
        return frozenset(tier for tier, handle in self._running if not handle.is_decided)

    def newest_step(self, tier: Tier) -> int | None:
        """Newest step on its way to `tier`, None if nothing is."""
        on_way = [handle for to, handle in self._running if to is tier and not handle.is_decided]
        return max((handle.step for handle in on_way), default=None)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of all saves; False if one has not ended after `timeout_s`."""
        return _all_within(timeout_s, [handle.wait for _, handle in self._running])

    def wait_for_verdicts(self, timeout_s: float, tiers: Collection[Tier]) -> bool:
        """Wait for what becomes of saves to `tiers`; False if one is not known by then."""
        running = [handle for tier, handle in self._running if tier in tiers]
        return _all_within(timeout_s, [handle.wait_for_verdict for handle in running])

    def take_ended(self) -> list[SaveOutcome]:
        """Outcomes of the saves that were decided since the last call, oldest first."""
        ended = [(handle, handle.outcome) for handle in self._unreported]
        self._unreported = [handle for handle, outcome in ended if outcome is None]
        return [outcome for _, outcome in ended if outcome is not None]


def _all_within(timeout_s: float, waits: Iterable[Callable[[float], bool]]) -> bool:
    deadline_s = time.monotonic() + timeout_s
    return all(wait(max(0.0, deadline_s - time.monotonic())) for wait in waits)
