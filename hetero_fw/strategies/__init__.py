"""Adapt plans to Lightning: each hook is one call."""

from hetero_fw.strategies.environment import PlanEnvironment
from hetero_fw.strategies.fsdp import HeteroFSDPStrategy
from hetero_fw.strategies.precision import HeteroPrecision

__all__ = ["HeteroFSDPStrategy", "HeteroPrecision", "PlanEnvironment"]
