"""Lightning callbacks: observe, ask one policy, act once."""

from hetero_fw.callbacks.checkpointing import AdaptiveCheckpoint
from hetero_fw.callbacks.emergency_save import EmergencySave, LimitWatch
from hetero_fw.callbacks.just_in_time import JustInTimeCheckpoint
from hetero_fw.callbacks.recording import StepRecorder
from hetero_fw.callbacks.restore_watch import RestoreWatch
from hetero_fw.callbacks.run_history import RunHistoryFacts, SaveHistory, read_facts
from hetero_fw.callbacks.save_cost import SaveCostMeter
from hetero_fw.callbacks.step_boundary import StepBoundary
from hetero_fw.callbacks.tier_schedule import TierSchedule

__all__ = [
    "AdaptiveCheckpoint",
    "EmergencySave",
    "JustInTimeCheckpoint",
    "LimitWatch",
    "RestoreWatch",
    "RunHistoryFacts",
    "SaveCostMeter",
    "SaveHistory",
    "StepBoundary",
    "StepRecorder",
    "TierSchedule",
    "read_facts",
]
