"""Watch ranks, end them cleanly, start them again."""

from hetero_fw.recovery.attempt import AttemptFiles, NodeRanks, RankEnd
from hetero_fw.recovery.config import RecoveryConfig
from hetero_fw.recovery.failure import RankFailure, classify_exception, write_failure
from hetero_fw.recovery.fork_server import share_fork_server
from hetero_fw.recovery.heartbeat import Heartbeat
from hetero_fw.recovery.lifeline import die_with_parent
from hetero_fw.recovery.stop import SaveRequest, StopRequest
from hetero_fw.recovery.store import StoreAddress
from hetero_fw.recovery.supervisor import AttemptSpec, RunOutcome, Supervisor

__all__ = [
    "AttemptFiles",
    "AttemptSpec",
    "Heartbeat",
    "NodeRanks",
    "RankEnd",
    "RankFailure",
    "RecoveryConfig",
    "RunOutcome",
    "SaveRequest",
    "StopRequest",
    "StoreAddress",
    "Supervisor",
    "classify_exception",
    "die_with_parent",
    "share_fork_server",
    "write_failure",
]
