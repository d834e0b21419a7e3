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
        return frozenset(tier for tier, _ in self._running)

    def newest_step(self, tier: Tier) -> int | None:
        """Newest step on its way to `tier`, None if nothing is."""
        steps = [handle.step for to, handle in self._running if to is tier and not handle.is_done]
        return max(steps, default=None)

    def wait(self, timeout_s: float, tiers: Collection[Tier]) -> bool:
        """Wait for the saves to `tiers`; False if one is still in flight after `timeout_s`."""
        return _all_within(timeout_s, [h.wait for tier, h in self._running if tier in tiers])

    def wait_for_verdicts(self, timeout_s: float) -> bool:
        """Wait until each is committed or has failed; False if one is not after `timeout_s`."""
        return _all_within(timeout_s, [handle.wait_for_verdict for _, handle in self._running])

    def take_ended(self) -> list[SaveOutcome]:
        """Outcomes of the saves that ended since the last call, oldest first."""
        ended = [(handle, handle.outcome) for handle in self._unreported]
        self._unreported = [handle for handle, outcome in ended if outcome is None]
        return [outcome for _, outcome in ended if outcome is not None]


def _all_within(timeout_s: float, waits: Iterable[Callable[[float], bool]]) -> bool:
    deadline_s = time.monotonic() + timeout_s
    return all(wait(max(0.0, deadline_s - time.monotonic())) for wait in waits)
