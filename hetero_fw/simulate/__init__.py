"""Discrete-event simulation of failures and checkpoints, with the policies that real runs use.

Pure: seeds and traces come in, seconds come out. No clock is read and nothing waits.
"""

from hetero_fw.simulate.checkpointed_run import SimulatedJob, SimulatedRun, simulate_run
from hetero_fw.simulate.choosers import (
    Chooser,
    Moment,
    OracleChooser,
    PolicyChooser,
    SaveMeasurement,
)
from hetero_fw.simulate.failures import (
    Failure,
    NodeTrace,
    StepFunction,
    draw_failures,
    parse_node_trace,
)

__all__ = [
    "Chooser",
    "Failure",
    "Moment",
    "NodeTrace",
    "OracleChooser",
    "PolicyChooser",
    "SaveMeasurement",
    "SimulatedJob",
    "SimulatedRun",
    "StepFunction",
    "draw_failures",
    "parse_node_trace",
    "simulate_run",
]
