"""Whether readings of a device and its host call for an emergency save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from hetero_fw.errors import ConfigError


class Measure(StrEnum):
    """What is watched. The order is part of what ranks tell each other: append at the end."""

    HOST_MEMORY_PERCENT = "host_memory_percent"
    HOST_SWAP_PERCENT = "host_swap_percent"
    DEVICE_MEMORY_PERCENT = "device_memory_percent"
    DEVICE_UTILIZATION_PERCENT = "device_utilization_percent"
    DEVICE_TEMPERATURE_OVER_SLOWDOWN_C = "device_temperature_over_slowdown_c"
    DEVICE_ECC_ERRORS = "device_ecc_errors"
    DEVICE_XID_ERRORS = "device_xid_errors"
    DEVICE_THROTTLING = "device_throttling"


# Counts that never fall: what counts is what came since the last save, or since the first reading.
COUNTERS = frozenset({Measure.DEVICE_ECC_ERRORS, Measure.DEVICE_XID_ERRORS})
_UNITS = {
    Measure.HOST_MEMORY_PERCENT: " %",
    Measure.HOST_SWAP_PERCENT: " %",
    Measure.DEVICE_MEMORY_PERCENT: " %",
    Measure.DEVICE_UTILIZATION_PERCENT: " %",
    Measure.DEVICE_TEMPERATURE_OVER_SLOWDOWN_C: " C",
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was read at one moment; what could not be read is missing.

    Attributes:
        notes: words for the reason, such as the number of an XID.
    """

    values: Mapping[Measure, float]
    notes: Mapping[Measure, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A save is due once readings have been above `above` for `sustained_s`.

    Attributes:
        rearm_below: after a save the readings must fall below this before they can ask again;
            None: `above`. Without meaning for `COUNTERS`.
    """

    above: float
    sustained_s: float = 0.0
    rearm_below: float | None = None

    def __post_init__(self) -> None:
        if self.rearm_below is not None and self.rearm_below > self.above:
            raise ConfigError(
                f"rearm_below={self.rearm_below:g}: must not be higher than above={self.above:g}."
            )
        if self.sustained_s < 0:
            raise ConfigError(f"sustained_s={self.sustained_s:g}: must be a number >= 0.")


@dataclass(frozen=True, kw_only=True)
class LimitRule:
    """All limits, and the least time between two saves that they bring about."""

    limits: Mapping[Measure, Limit]
    cooldown_s: float


@dataclass(frozen=True, kw_only=True)
class Watch:
    """One measure as it has developed.

    Attributes:
        value: newest reading. `base`: what a counter is compared with.
        above_since_s: since when all readings have been above the limit, None if the last is not.
        is_armed: False from a save on until readings fall below `rearm_below`.
    """

    value: float
    base: float = 0.0
    above_since_s: float | None = None
    is_armed: bool = True
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class LimitState:
    """What the policy remembers between readings."""

    watches: Mapping[Measure, Watch] = field(default_factory=dict)
    last_save_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class EmergencyDecision:
    """Whether to save now, for which measure and why."""

    save: bool
    reason: str
    measure: Measure | None = None


def observe_reading(
    rule: LimitRule, state: LimitState, reading: Reading, now_s: float
) -> LimitState:
    """Take in a reading. What is missing from it has not been above its limit all the time."""
    watches = {
        measure: _advance(limit, measure, state.watches.get(measure), reading, now_s)
        for measure, limit in rule.limits.items()
        if measure in reading.values
    }
    missing = {
        measure: replace(watch, above_since_s=None)
        for measure, watch in state.watches.items()
        if measure not in watches
    }
    return replace(state, watches={**missing, **watches})


def _advance(
    limit: Limit, measure: Measure, before: Watch | None, reading: Reading, now_s: float
) -> Watch:
    value = reading.values[measure]
    is_counter = measure in COUNTERS
    if before is None:
        before = Watch(value=value, base=value if is_counter else 0.0)
    is_above = value - before.base > limit.above
    rearm_below = limit.above if limit.rearm_below is None else limit.rearm_below
    since_s = now_s if before.above_since_s is None else before.above_since_s
    return Watch(
        value=value,
        base=before.base,
        above_since_s=since_s if is_above else None,
        is_armed=before.is_armed or is_counter or value < rearm_below,
        note=reading.notes.get(measure, ""),
    )


def decide_emergency_save(rule: LimitRule, state: LimitState, now_s: float) -> EmergencyDecision:
    """Save if a limit has been exceeded long enough and the cool-down is over."""
    due = [measure for measure in rule.limits if _is_due(rule, state, measure, now_s)]
    if not due:
        return EmergencyDecision(save=False, reason="no limit is exceeded")
    text = ", and ".join(_describe(rule.limits[m], m, state.watches[m], now_s) for m in due)
    if state.last_save_s is not None and now_s - state.last_save_s < rule.cooldown_s:
        left_s = rule.cooldown_s - (now_s - state.last_save_s)
        return EmergencyDecision(save=False, reason=f"{left_s:.0f} s of cool-down left: {text}")
    return EmergencyDecision(save=True, reason=text, measure=due[0])


def after_emergency_save(state: LimitState, now_s: float) -> LimitState:
    """Begin the cool-down; what is above its limit has been answered by this save.

    Also where it did not last long enough yet: ranks of one host read the same values a moment
    apart, and each would otherwise ask for a save of its own.
    """
    watches = {
        measure: replace(
            watch,
            base=watch.value if measure in COUNTERS else watch.base,
            above_since_s=None if measure in COUNTERS else watch.above_since_s,
            is_armed=watch.above_since_s is None or measure in COUNTERS,
        )
        if watch.is_armed
        else watch
        for measure, watch in state.watches.items()
    }
    return LimitState(watches=watches, last_save_s=now_s)


def _is_due(rule: LimitRule, state: LimitState, measure: Measure, now_s: float) -> bool:
    watch = state.watches.get(measure)
    if watch is None or watch.above_since_s is None or not watch.is_armed:
        return False
    return now_s - watch.above_since_s >= rule.limits[measure].sustained_s


def _describe(limit: Limit, measure: Measure, watch: Watch, now_s: float) -> str:
    assert watch.above_since_s is not None
    unit = _UNITS.get(measure, "")
    note = f" ({watch.note})" if watch.note else ""
    value = watch.value - watch.base
    return (
        f"{measure.value} {value:.4g}{unit}{note}, above {limit.above:g}{unit} "
        f"for {now_s - watch.above_since_s:.1f} s"
    )
