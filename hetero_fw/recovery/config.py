"""What the config group `recovery` sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """Config group `recovery`.

    Attributes:
        max_restarts: restarts in a row without a new step before the run fails.
        backoff_s: wait before the n-th restart in a row without progress, times n.
        heartbeat_interval_s: how often a rank gives a sign of life.
        heartbeat_max_missed: beats a rank may miss before it is killed.
        process_group_timeout_s: bound on every collective.
        start_timeout_s: bound on all ranks of an attempt having started.
        signals: names of the signals that end the run.
        grace_s: time from the first of them until ranks that still run are killed.
    """

    max_restarts: int = 3
    backoff_s: float = 0.0
    heartbeat_interval_s: float = 10.0
    heartbeat_max_missed: int = 3
    process_group_timeout_s: float = 300.0
    start_timeout_s: float = 120.0
    signals: Sequence[str] = ("SIGTERM", "SIGUSR1", "SIGUSR2")
    grace_s: float = 120.0
