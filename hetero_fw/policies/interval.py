"""How many steps to train between two checkpoints.

T = sqrt(2 * C * M) (J. W. Young, "A first order approximation to the optimum checkpoint interval",
CACM 17(9), 1974) where C / M is small, and its higher-order form (J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006) where it is not.
C is what a save costs training (its stall plus the slowdown while it is written, not the time to
write it) and M the mean time between failures. Each tier of storage has its own C and interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hetero_fw.errors import ConfigError
from hetero_fw.policies.mtbf import MtbfEstimate

# Enough saves for a median that one slow save does not move, few enough to follow a drift.
RECENT_SAVES = 9


class IntervalPolicy(StrEnum):
    """How the interval is chosen; `ckpt.policy`."""

    ADAPTIVE = "adaptive"
    FIXED = "fixed"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class IntervalRule:
    """What the user asked for.

    Attributes:
        interval_steps: the fixed interval; under `ADAPTIVE` the interval until costs are known,
            and the longest one until a failure was seen.
        first_save_step: under `ADAPTIVE`, steps until the first save, which measures the cost and
            proves that the storage works.
        prior_mtbf_s: mean time between failures assumed before any was seen, see `prior_rates`.
        key: configuration key that `interval_steps` comes from, for messages.
    """

    policy: IntervalPolicy = IntervalPolicy.ADAPTIVE
    interval_steps: int = 500
    first_save_step: int = 10
    prior_mtbf_s: float | Mapping[str, float] = 10800.0
    key: str = "ckpt.interval_steps"

    def __post_init__(self) -> None:
        rules = {
            "ckpt.interval_steps": (self.interval_steps, 1, "at least 1"),
            "ckpt.first_save_step": (self.first_save_step, 1, "at least 1"),
        }
        problems = [
            f"{key}={value} must be {rule}."
            for key, (value, least, rule) in rules.items()
            if value < least
        ]
        problems += [
            f"{key}={value} must be above 0 seconds."
            for key, value in self._priors().items()
            if not value > 0
        ]
        ConfigError.collect(problems)

    def _priors(self) -> dict[str, float]:
        key, prior_s = "ckpt.prior_mtbf_s", self.prior_mtbf_s
        if isinstance(prior_s, Mapping):
            return {f"{key}.{group}": value for group, value in prior_s.items()}
        return {key: prior_s}


@dataclass(frozen=True, kw_only=True)
class IntervalObservation:
    """What was measured so far of one tier, newest last; also in attempts before this one.

    Attributes:
        mtbf: how often the cluster fails.
        step_times_s: recent step times without a save in them.
        save_costs_s: stall plus slowdown of each successful save.
        persist_times_s: from the end of staging to the commit, of each successful save.
        num_saves_started: saves this attempt has started, successful or not.
    """

    mtbf: MtbfEstimate
    step_times_s: Sequence[float] = ()
    save_costs_s: Sequence[float] = ()
    persist_times_s: Sequence[float] = ()
    num_saves_started: int = 0


@dataclass(frozen=True, kw_only=True)
class IntervalDecision:
    """Steps between the starts of two saves (None: never save) and why."""

    interval_steps: int | None
    reason: str


def young_interval_s(cost_s: float, mtbf_s: float) -> float:
    """First-order optimum of the seconds of training between two saves that cost `cost_s` each.

    Raises:
        ValueError: `cost_s` is negative or `mtbf_s` is not positive.
    """
    if cost_s < 0 or not mtbf_s > 0:
        raise ValueError(f"cost_s={cost_s} must be >= 0 and mtbf_s={mtbf_s} > 0.")
    return math.sqrt(2.0 * cost_s * mtbf_s)


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Higher-order optimum (Daly 2006, eq. 37), which `young_interval_s` is the limit of.

    Raises:
        ValueError: `cost_s` is negative or `mtbf_s` is not positive.
    """
    young_s = young_interval_s(cost_s, mtbf_s)
    if cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2.0 * mtbf_s)
    return young_s * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost_s


def decide_interval(rule: IntervalRule, observed: IntervalObservation) -> IntervalDecision:
    """Choose the interval that `rule` asks for, from what was `observed`."""
    if rule.policy is IntervalPolicy.NONE:
        return IntervalDecision(
            interval_steps=None, reason="checkpoints are off (ckpt.policy=none)"
        )
    if rule.policy is IntervalPolicy.FIXED:
        return IntervalDecision(
            interval_steps=rule.interval_steps,
            reason=f"fixed: every {rule.interval_steps} steps ({rule.key})",
        )
    if observed.save_costs_s and observed.step_times_s:
        return _optimum(rule, observed)
    return _before_measurement(rule, observed)


def _before_measurement(rule: IntervalRule, observed: IntervalObservation) -> IntervalDecision:
    if observed.num_saves_started == 0 and rule.first_save_step < rule.interval_steps:
        return IntervalDecision(
            interval_steps=rule.first_save_step,
            reason=f"adaptive: first save after {rule.first_save_step} steps to measure its cost "
            "(ckpt.first_save_step)",
        )
    return IntervalDecision(
        interval_steps=rule.interval_steps,
        reason=f"adaptive: no cost measured yet, every {rule.interval_steps} steps "
        "(ckpt.interval_steps)",
    )


def _optimum(rule: IntervalRule, observed: IntervalObservation) -> IntervalDecision:
    costs_s = observed.save_costs_s[-RECENT_SAVES:]
    cost_s = max(0.0, statistics.median(costs_s))
    step_s = max(1e-9, statistics.median(observed.step_times_s))
    optimum_s = daly_interval_s(cost_s, observed.mtbf.mtbf_s)
    steps, limit = _bounded(max(1, round(optimum_s / step_s)), step_s, rule, observed)
    return IntervalDecision(
        interval_steps=steps,
        reason=f"adaptive: cost {cost_s:.4g} s (median of {len(costs_s)} saves) and "
        f"{observed.mtbf.reason} make {optimum_s:.4g} s by Young and Daly, "
        f"{steps} steps of {step_s:.4g} s{limit}",
    )


def _bounded(
    steps: int, step_s: float, rule: IntervalRule, observed: IntervalObservation
) -> tuple[int, str]:
    """Apply the limits to `steps`; the second value says which one changed it."""
    limit = ""
    if observed.mtbf.num_failures == 0 and steps > rule.interval_steps:
        steps = rule.interval_steps
        limit = f" (at most ckpt.interval_steps={steps} until a failure was seen)"
    if observed.persist_times_s:
        persist_s = max(0.0, statistics.median(observed.persist_times_s[-RECENT_SAVES:]))
        # A save can only start when the one before is on storage.
        persist_steps = math.ceil(persist_s / step_s)
        if persist_steps > steps:
            steps, limit = persist_steps, f" (writing one takes {persist_s:.4g} s)"
    return steps, limit
