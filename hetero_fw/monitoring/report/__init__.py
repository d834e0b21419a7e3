"""`report.html`: a run to look at, in one self-contained file."""

from __future__ import annotations

from hetero_fw.monitoring.report.write import render_report, write_report

__all__ = ["render_report", "write_report"]
