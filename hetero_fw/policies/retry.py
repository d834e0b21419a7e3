"""Whether a storage operation that failed is tried again, and how long to wait before."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StorageErrorKind(StrEnum):
    """Why storage refused an operation."""

    FULL = "full"
    READ_ONLY = "read_only"
    DENIED = "denied"
    MISSING = "missing"
    EXISTS = "exists"
    TRANSIENT = "transient"
    UNKNOWN = "unknown"


# A second try a moment later meets the same end. The next save tries anew in any case.
PERMANENT_STORAGE_ERRORS = frozenset(
    {
        StorageErrorKind.FULL,
        StorageErrorKind.READ_ONLY,
        StorageErrorKind.DENIED,
        StorageErrorKind.MISSING,
        StorageErrorKind.EXISTS,
    }
)


@dataclass(frozen=True, kw_only=True)
class RetryRule:
    """How patient to be.

    Attributes:
        max_tries: in all, the first one included; an error of unknown kind gets
            `max_unknown_tries`.
        first_pause_s: before the second try; each pause is twice the one before, up to
            `max_pause_s`.
    """

    max_tries: int = 8
    max_unknown_tries: int = 2
    first_pause_s: float = 0.25
    max_pause_s: float = 15.0

    def __post_init__(self) -> None:
        if self.max_tries < 1 or self.max_unknown_tries < 1:
            raise ValueError(
                f"max_tries={self.max_tries} and max_unknown_tries={self.max_unknown_tries} must "
                "be at least 1."
            )
        if not 0 <= self.first_pause_s <= self.max_pause_s:
            raise ValueError(
                f"first_pause_s={self.first_pause_s} must be between 0 and "
                f"max_pause_s={self.max_pause_s}."
            )


@dataclass(frozen=True, kw_only=True)
class RetryObservation:
    """What is known after a try that failed.

    Attributes:
        num_tries: tries so far, at least 1.
        elapsed_s: since the first try began; `deadline_s` is when, by the same clock, the
            operation must be complete.
        jitter: a number in 0..1 that differs between ranks, so that many that failed together do
            not come back together; the pause is that part of its upper half.
    """

    num_tries: int
    elapsed_s: float
    deadline_s: float
    kind: StorageErrorKind
    jitter: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RetryDecision:
    """Whether to try again, after how many seconds, and why or why not."""

    retry: bool
    pause_s: float
    reason: str


def decide_retry(rule: RetryRule, observation: RetryObservation) -> RetryDecision:
    """Try again with exponentially growing pauses, unless it is hopeless or too late.

    A permanent error is never retried, and no pause ends after the deadline.
    """
    tries = observation.num_tries
    if observation.kind in PERMANENT_STORAGE_ERRORS:
        return _give_up(f"{observation.kind}: another try would fail in the same way")
    is_unknown = observation.kind is StorageErrorKind.UNKNOWN
    max_tries = min(rule.max_tries, rule.max_unknown_tries) if is_unknown else rule.max_tries
    if tries >= max_tries:
        return _give_up(f"{observation.kind}: failed {tries} times of {max_tries}")
    pause_s = _pause_s(rule, tries) * (0.5 + 0.5 * observation.jitter)
    left_s = observation.deadline_s - observation.elapsed_s
    if pause_s >= left_s:
        return _give_up(
            f"{observation.kind}: {max(0.0, left_s):.1f} s are left of "
            f"{observation.deadline_s:.0f} s after {tries} tries"
        )
    return RetryDecision(
        retry=True,
        pause_s=pause_s,
        reason=f"{observation.kind}: try {tries + 1} of {max_tries} in {pause_s:.2f} s",
    )


def _pause_s(rule: RetryRule, num_tries: int) -> float:
    # More doublings than this exceed any pause, and floats in the end.
    return float(min(rule.max_pause_s, rule.first_pause_s * 2.0 ** min(num_tries - 1, 60)))


def _give_up(reason: str) -> RetryDecision:
    return RetryDecision(retry=False, pause_s=0.0, reason=reason)
