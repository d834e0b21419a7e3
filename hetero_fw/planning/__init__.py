"""Who computes which share of each step, decided from plain data."""

from hetero_fw.planning.describe import format_plan, plan_grid
from hetero_fw.planning.emulation import make_emulated_plan
from hetero_fw.planning.plan import (
    BatchSplit,
    EmulationPlan,
    ParallelPlan,
    PlanKind,
    RankPlan,
)
from hetero_fw.planning.precision import PrecisionChoice, choose_precision
from hetero_fw.planning.predict import StepPrediction, predict_step
from hetero_fw.planning.request import PlanRequest
from hetero_fw.planning.search import make_plan

__all__ = [
    "BatchSplit",
    "EmulationPlan",
    "ParallelPlan",
    "PlanKind",
    "PlanRequest",
    "PrecisionChoice",
    "RankPlan",
    "StepPrediction",
    "choose_precision",
    "format_plan",
    "make_emulated_plan",
    "make_plan",
    "plan_grid",
    "predict_step",
]
