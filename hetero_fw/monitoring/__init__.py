"""What a run leaves behind: its directory, events, metrics, console lines, summary and report."""

from __future__ import annotations

from hetero_fw.monitoring.atomic_file import write_json_atomically, write_text_atomically
from hetero_fw.monitoring.console import Progress, StepPrinter, format_banner
from hetero_fw.monitoring.events import EventLog, EventName, read_events
from hetero_fw.monitoring.history import RunHistory, read_history
from hetero_fw.monitoring.lineage import attempt_starts, saves_on_line
from hetero_fw.monitoring.log_lines import label_log_lines
from hetero_fw.monitoring.metrics import (
    MetricsWriter,
    ScalarWriter,
    last_step,
    read_metrics,
    read_scalars,
)
from hetero_fw.monitoring.quantities import format_bytes, format_duration, format_number
from hetero_fw.monitoring.report import write_report
from hetero_fw.monitoring.rundir import RunDirectory, attempt_numbers, create_run_directory
from hetero_fw.monitoring.runlock import RunLock
from hetero_fw.monitoring.saves import committed_saves, num_committed_saves, rejected_steps
from hetero_fw.monitoring.secrets import MASK, without_secrets
from hetero_fw.monitoring.status import RunStatus, Status, read_status, write_status
from hetero_fw.monitoring.step_record import StepRecord
from hetero_fw.monitoring.summary import build_summary, summarize, write_summary
from hetero_fw.monitoring.telemetry import (
    HostTelemetry,
    NvmlTelemetry,
    TelemetrySource,
    TelemetryThread,
    available_memory_bytes,
)

__all__ = [
    "MASK",
    "EventLog",
    "EventName",
    "HostTelemetry",
    "MetricsWriter",
    "NvmlTelemetry",
    "Progress",
    "RunDirectory",
    "RunHistory",
    "RunLock",
    "RunStatus",
    "ScalarWriter",
    "Status",
    "StepPrinter",
    "StepRecord",
    "TelemetrySource",
    "TelemetryThread",
    "attempt_numbers",
    "attempt_starts",
    "available_memory_bytes",
    "build_summary",
    "committed_saves",
    "create_run_directory",
    "format_banner",
    "format_bytes",
    "format_duration",
    "format_number",
    "label_log_lines",
    "last_step",
    "num_committed_saves",
    "read_events",
    "read_history",
    "read_metrics",
    "read_scalars",
    "read_status",
    "rejected_steps",
    "saves_on_line",
    "summarize",
    "without_secrets",
    "write_json_atomically",
    "write_report",
    "write_status",
    "write_summary",
    "write_text_atomically",
]
