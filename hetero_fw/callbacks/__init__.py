"""Lightning callbacks: observe, ask one policy, act once."""

from hetero_fw.callbacks.checkpointing import AdaptiveCheckpoint, RunHistoryFacts, read_facts
from hetero_fw.callbacks.recording import StepRecorder

__all__ = ["AdaptiveCheckpoint", "RunHistoryFacts", "StepRecorder", "read_facts"]
