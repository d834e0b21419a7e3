"""Decisions about saving, keeping, restarting and scaling: facts in, a decision with a reason out.

Nothing here reads a clock, a file or another rank. What depends on measurements of one rank must
be agreed across ranks by the caller before anyone acts on the decision.
"""

from hetero_fw.policies.interval import (
    IntervalDecision,
    IntervalObservation,
    IntervalPolicy,
    IntervalRule,
    decide_interval,
    estimate_mtbf_s,
    young_interval_s,
)
from hetero_fw.policies.learning_rate import linear_scaled_lr
from hetero_fw.policies.restart import FailureKind, RestartDecision, decide_restart
from hetero_fw.policies.retention import RetentionDecision, decide_retention
from hetero_fw.policies.saving import SaveDecision, SaveObservation, decide_save

__all__ = [
    "FailureKind",
    "IntervalDecision",
    "IntervalObservation",
    "IntervalPolicy",
    "IntervalRule",
    "RestartDecision",
    "RetentionDecision",
    "SaveDecision",
    "SaveObservation",
    "decide_interval",
    "decide_restart",
    "decide_retention",
    "decide_save",
    "estimate_mtbf_s",
    "linear_scaled_lr",
    "young_interval_s",
]
