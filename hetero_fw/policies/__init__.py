"""Decisions about saving, keeping, restarting and scaling: facts in, a decision with a reason out.

Nothing here reads a clock, a file or another rank. What depends on measurements of one rank must
be agreed across ranks by the caller before anyone acts on the decision.
"""

from hetero_fw.policies.interval import (
    IntervalDecision,
    IntervalObservation,
    IntervalPolicy,
    IntervalRule,
    daly_interval_s,
    decide_interval,
    young_interval_s,
)
from hetero_fw.policies.just_in_time import (
    JustInTimeDecision,
    JustInTimeObservation,
    decide_just_in_time,
)
from hetero_fw.policies.learning_rate import linear_scaled_lr
from hetero_fw.policies.limits import (
    COUNTERS,
    EmergencyDecision,
    Limit,
    LimitRule,
    LimitState,
    Measure,
    Reading,
    after_emergency_save,
    decide_emergency_save,
    observe_reading,
)
from hetero_fw.policies.lineage import AttemptStart, Departure, find_departure
from hetero_fw.policies.mtbf import (
    AttemptRecord,
    DeviceGroup,
    FailureRates,
    MtbfEstimate,
    learn_failure_rates,
)
from hetero_fw.policies.quarantine import (
    DivergenceDecision,
    RestoredTraining,
    decide_divergence,
    is_quarantined,
)
from hetero_fw.policies.replicas import ReplicaNode, ReplicaPlan, plan_replicas
from hetero_fw.policies.restart import PERMANENT, FailureKind, RestartDecision, decide_restart
from hetero_fw.policies.retention import (
    MIN_KEPT,
    CommittedCheckpoint,
    MonitorMode,
    RetentionDecision,
    RetentionRule,
    decide_retention,
    decide_room,
)
from hetero_fw.policies.retry import (
    PERMANENT_STORAGE_ERRORS,
    RetryDecision,
    RetryObservation,
    RetryRule,
    StorageErrorKind,
    decide_retry,
)
from hetero_fw.policies.saving import SaveDecision, SaveObservation, Tier, decide_save

__all__ = [
    "COUNTERS",
    "MIN_KEPT",
    "PERMANENT",
    "PERMANENT_STORAGE_ERRORS",
    "AttemptRecord",
    "AttemptStart",
    "CommittedCheckpoint",
    "Departure",
    "DeviceGroup",
    "DivergenceDecision",
    "EmergencyDecision",
    "FailureKind",
    "FailureRates",
    "IntervalDecision",
    "IntervalObservation",
    "IntervalPolicy",
    "IntervalRule",
    "JustInTimeDecision",
    "JustInTimeObservation",
    "Limit",
    "LimitRule",
    "LimitState",
    "Measure",
    "MonitorMode",
    "MtbfEstimate",
    "Reading",
    "ReplicaNode",
    "ReplicaPlan",
    "RestartDecision",
    "RestoredTraining",
    "RetentionDecision",
    "RetentionRule",
    "RetryDecision",
    "RetryObservation",
    "RetryRule",
    "SaveDecision",
    "SaveObservation",
    "StorageErrorKind",
    "Tier",
    "after_emergency_save",
    "daly_interval_s",
    "decide_divergence",
    "decide_emergency_save",
    "decide_interval",
    "decide_just_in_time",
    "decide_restart",
    "decide_retention",
    "decide_retry",
    "decide_room",
    "decide_save",
    "find_departure",
    "is_quarantined",
    "learn_failure_rates",
    "linear_scaled_lr",
    "observe_reading",
    "plan_replicas",
    "young_interval_s",
]
