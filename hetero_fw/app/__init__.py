"""Compose a run from its configuration. The only place, beside the cli, that knows Hydra."""

from hetero_fw.app.command_line import check_command_line, job_config, worst_status
from hetero_fw.app.compose import compose_checked
from hetero_fw.app.groups import HYDRA_VERSION_BASE, ConfigSource
from hetero_fw.app.planner import plan_for
from hetero_fw.app.problem import report_config_error
from hetero_fw.app.run import run
from hetero_fw.app.validate import validate

__all__ = [
    "HYDRA_VERSION_BASE",
    "ConfigSource",
    "check_command_line",
    "compose_checked",
    "job_config",
    "plan_for",
    "report_config_error",
    "run",
    "validate",
    "worst_status",
]
