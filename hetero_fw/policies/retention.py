"""Which checkpoints may be deleted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum

from hetero_fw.errors import ConfigError

# The newest checkpoint can turn out to be unreadable; the one before it must then be there.
MIN_KEPT = 2
_NOTHING_SOUND = (
    "no checkpoint was found to be as it was written, so none is deleted; `hetero ckpt verify` "
    "says what is wrong"
)


class MonitorMode(StrEnum):
    """Which value of a metric is the better one."""

    MIN = "min"
    MAX = "max"


@dataclass(frozen=True, kw_only=True)
class RetentionRule:
    """What to keep.

    Attributes:
        keep_latest_k: the newest ones; at least 2.
        keep_best: as many of those with the best metric; among equal ones the newest.
        monitor: the metric's name; None: there is no best.
        keep_every_n_steps: for each multiple of it the first at or after it, before the next
            multiple, for good; None: no such.

    Raises:
        ConfigError: a number is too small.
    """

    keep_latest_k: int = 3
    keep_best: int = 1
    monitor: str | None = None
    monitor_mode: MonitorMode = MonitorMode.MIN
    keep_every_n_steps: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.keep_latest_k < MIN_KEPT:
            problems.append(
                f"ckpt.keep_latest_k={self.keep_latest_k} must be at least {MIN_KEPT}: "
                "the newest checkpoint can turn out to be unreadable."
            )
        if self.keep_best < 0:
            problems.append(f"ckpt.keep_best={self.keep_best} must be at least 0.")
        if self.keep_every_n_steps is not None and self.keep_every_n_steps < 1:
            problems.append(
                f"ckpt.keep_every_n_steps={self.keep_every_n_steps} must be at least 1, or null."
            )
        ConfigError.collect(problems)


@dataclass(frozen=True, kw_only=True)
class CommittedCheckpoint:
    """What the policy knows of a published checkpoint.

    Attributes:
        attempt: that has saved it. One of a later attempt is newer, whatever its step: that attempt
            has gone back, and what it left behind must not crowd out what it saves.
        is_verified: its bytes were compared with its manifest.
        is_finite: it holds no value that is not finite.
        metric: its value of the monitored metric; None if it has none.
    """

    step: int
    attempt: int = 0
    is_verified: bool
    is_finite: bool = True
    metric: float | None = None


@dataclass(frozen=True, kw_only=True)
class RetentionDecision:
    """Steps to delete, oldest first, and why these.

    Attributes:
        rule: what there is room to keep from now on, where that is less than was asked for.
    """

    delete_steps: tuple[int, ...]
    reason: str
    rule: RetentionRule | None = None


def decide_retention(
    committed: Collection[CommittedCheckpoint], rule: RetentionRule
) -> RetentionDecision:
    """Delete what `rule` does not keep, as far as that is safe.

    Never deleted, whatever the rule says: the two newest that are verified and finite, the newest
    finite one, and anything that no verified and finite one is newer than.
    """
    newest_first = _newest_first(committed)
    sound = [item.step for item in newest_first if item.is_verified and item.is_finite]
    if not sound:
        return RetentionDecision(delete_steps=(), reason=_NOTHING_SOUND)
    best = _best(newest_first, rule)
    periodic = _periodic(newest_first, rule)
    protected = {
        *(item.step for item in newest_first[: rule.keep_latest_k]),
        *sound[:MIN_KEPT],
        *[item.step for item in newest_first if item.is_finite][:1],
        *best,
        *periodic,
    }
    steps = [item.step for item in newest_first]
    older = steps[steps.index(sound[0]) + 1 :]
    delete = tuple(step for step in reversed(older) if step not in protected)
    return RetentionDecision(
        delete_steps=delete,
        reason=_reason(rule, sound[:MIN_KEPT], best, kept=[s for s in steps if s not in delete]),
    )


def decide_room(
    committed: Collection[CommittedCheckpoint],
    rule: RetentionRule,
    *,
    spares_kept_besides: bool = False,
) -> RetentionDecision:
    """Give one checkpoint up where there was no room for another.

    The oldest that a smaller `keep_latest_k` would not keep. Only where there is none such, one of
    those that are kept besides: the oldest of `keep_every_n_steps`, then the worst of the best.
    What `decide_retention` never deletes stays here as well.

    Args:
        spares_kept_besides: none of those, because deleting another one has just been of no use.
    """
    newest = [item.step for item in _newest_first(committed)]
    best = _best(_newest_first(committed), rule)
    found = decide_retention(committed, replace(rule, keep_latest_k=MIN_KEPT)).delete_steps
    if not found and not spares_kept_besides:
        found = _kept_besides(committed, best)
    if not found:
        return RetentionDecision(delete_steps=(), reason=f"no room, and none of {newest} can go")
    step = found[0]
    place = max(MIN_KEPT, newest.index(step))
    return RetentionDecision(
        delete_steps=(step,),
        reason=f"no room: step {step} goes for a newer one",
        rule=replace(
            rule,
            keep_latest_k=min(rule.keep_latest_k, place),
            keep_best=best.index(step) if step in best else rule.keep_best,
        ),
    )


def _kept_besides(committed: Collection[CommittedCheckpoint], best: list[int]) -> tuple[int, ...]:
    """What is kept although the newest ones are enough, those to delete first at the front."""
    bare = RetentionRule(keep_latest_k=MIN_KEPT, keep_best=0)
    steps = decide_retention(committed, bare).delete_steps
    worst_first = [step for step in reversed(best) if step in steps]
    return (*(step for step in steps if step not in best), *worst_first)


def _newest_first(committed: Collection[CommittedCheckpoint]) -> list[CommittedCheckpoint]:
    return sorted(committed, key=lambda item: (item.attempt, item.step), reverse=True)


def _best(newest_first: Collection[CommittedCheckpoint], rule: RetentionRule) -> list[int]:
    if rule.monitor is None:
        return []
    sign = 1.0 if rule.monitor_mode is MonitorMode.MIN else -1.0
    ranked = sorted(
        (sign * item.metric, -item.step)
        for item in newest_first
        if item.metric is not None and item.is_finite
    )
    return [-negative_step for _, negative_step in ranked[: rule.keep_best]]


def _periodic(newest_first: Collection[CommittedCheckpoint], rule: RetentionRule) -> list[int]:
    """Of each span from one multiple to the next the one that was saved first.

    Saved first and not of the least step: that one stays the same whatever is saved later, also
    where a later attempt has gone back. One that training cannot go on from counts only where its
    span has no other.
    """
    if rule.keep_every_n_steps is None:
        return []
    first: dict[int, CommittedCheckpoint] = {}
    for item in newest_first:
        span = item.step // rule.keep_every_n_steps
        if span > 0 and (item.is_finite or span not in first or not first[span].is_finite):
            first[span] = item
    return [item.step for item in first.values()]


def _reason(rule: RetentionRule, sound: list[int], best: list[int], kept: list[int]) -> str:
    parts = [f"keep_latest_k={rule.keep_latest_k}", f"steps {sound} verified"]
    if best:
        parts.append(f"steps {best} best by {rule.monitor}")
    if rule.keep_every_n_steps is not None:
        parts.append(f"keep_every_n_steps={rule.keep_every_n_steps}")
    return f"{', '.join(parts)}: keep {kept}"
