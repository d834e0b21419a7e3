"""Puts the report together from what a run directory holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from hetero_fw.monitoring.atomic_file import write_text_atomically
from hetero_fw.monitoring.history import Row, RunHistory, read_history
from hetero_fw.monitoring.metrics import GROUP_COLUMN_PREFIX
from hetero_fw.monitoring.quantities import format_rate
from hetero_fw.monitoring.report.checkpoints import save_table, trouble_table
from hetero_fw.monitoring.report.line_chart import Series, line_chart
from hetero_fw.monitoring.report.page import badge, page, section
from hetero_fw.monitoring.report.plan_picture import plan_picture
from hetero_fw.monitoring.report.tables import (
    event_table,
    group_table,
    headline,
    scalar_names,
    validation_table,
)
from hetero_fw.monitoring.report.timeline import timeline
from hetero_fw.monitoring.rundir import RunDirectory
from hetero_fw.monitoring.status import Status, read_status
from hetero_fw.monitoring.summary import summarize

_NUM_COLORS = 6
_MAX_VALIDATION_CHARTS = 6


def write_report(run_dir: RunDirectory) -> Path:
    """Write `report.html` from whatever the run has left so far; missing files are no error.

    Returns:
        Path of the report.
    """
    history = read_history(run_dir)
    summary = summarize(history, **_outcome(run_dir))
    plan_text = _read_text(run_dir.plan_text_path)
    html = render_report(history, summary, title=run_dir.name, plan_text=plan_text)
    write_text_atomically(run_dir.report_path, html)
    return run_dir.report_path


def render_report(
    history: RunHistory, summary: Mapping[str, Any], *, title: str, plan_text: str = ""
) -> str:
    """The report as HTML text.

    Args:
        history: what happened.
        title: name of the run.
        summary: what `summarize` returned for `history`.
        plan_text: the plan as a table, shown on demand.
    """
    colors = _group_colors(history)
    emulated = badge("EMULATED") if summary["emulated"] else ""
    body = [
        _emulation_banner(summary),
        headline(summary),
        section("Loss", _loss_chart(history)),
        section("Step time by hardware group", _times(history, summary, colors)),
        section("The run over time", timeline(history)),
        _checkpoints(history),
        section("Plan", _plan(history.plan, colors, plan_text)),
        _validation(history),
        section("Events", event_table(history.events)),
    ]
    return page(
        title=title,
        badges=badge(str(summary["status"])) + emulated,
        subtitle=_subtitle(summary),
        body=[part for part in body if part],
    )


def _subtitle(summary: Row) -> str:
    parts = [str(summary["reason"])] if summary["reason"] else []
    if summary["weights_digest"]:
        parts.append(f"weights digest {summary['weights_digest']}")
    return " · ".join(parts)


def _emulation_banner(summary: Row) -> str:
    emulation = summary["emulation"]
    if emulation is None:
        return ""
    text = "The devices of this plan were not present: CPU processes stood in for them, paced to "
    text += "their relative speeds. Losses are real; times are not the devices' own."
    if emulation.get("dilation"):
        text += f" One second on the devices takes {format_rate(emulation['dilation'])} s here."
    if emulation.get("stretch"):
        text += f" Compute took {emulation['stretch']:.2f} times its target at the median step."
    return f'<p class="banner"><b>EMULATED.</b> {escape(text)}</p>'


def _group_colors(history: RunHistory) -> dict[str, str]:
    planned = [rank["group"] for rank in history.plan.get("ranks", ())]
    prefix = GROUP_COLUMN_PREFIX
    columns = history.steps[0] if history.steps else {}
    measured = [name.removeprefix(prefix) for name in columns if name.startswith(prefix)]
    names = dict.fromkeys([*planned, *measured])
    return {name: f"var(--c{index % _NUM_COLORS})" for index, name in enumerate(names)}


def _series(rows: tuple[Row, ...], column: str, name: str, color: str, style: str) -> Series:
    points = [(row["step"], row[column]) for row in rows if row.get(column) is not None]
    return Series(name=name, points=points, color=color, style=style)


def _loss_chart(history: RunHistory) -> str:
    series = [_series(history.steps, "loss", "training loss", "var(--c0)", "line")]
    for index, name in enumerate(_loss_names(history)):
        color = f"var(--c{1 + index % (_NUM_COLORS - 1)})"
        series.append(_series(history.validation, name, name, color, "dots"))
    return line_chart(series, y_label="loss", title="Loss over optimizer steps")


def _loss_names(history: RunHistory) -> list[str]:
    return [name for name in scalar_names(history.validation) if "loss" in name.lower()]


def _times(history: RunHistory, summary: Row, colors: Mapping[str, str]) -> str:
    rows = history.steps
    series = [
        _series(rows, f"{GROUP_COLUMN_PREFIX}{group}", f"{group}: compute", color, "line")
        for group, color in colors.items()
    ]
    series = [line for line in series if line.points]
    series.append(_series(rows, "step_time_s", "whole step", "var(--muted)", "line"))
    predicted_s = summary["predicted_step_s"]
    if predicted_s and rows:
        ends = [(rows[0]["step"], predicted_s), (rows[-1]["step"], predicted_s)]
        series.append(
            Series(name="predicted step", points=ends, color="var(--ink)", style="dashed")
        )
    chart = line_chart(
        series,
        y_label="seconds",
        title="Step time by hardware group",
        starts_at_zero=True,
    )
    return chart + group_table(summary["groups"], colors)


def _checkpoints(history: RunHistory) -> str:
    tables = save_table(history.events) + trouble_table(history.events)
    return section("Checkpoints", tables) if tables else ""


def _plan(plan: Row, colors: Mapping[str, str], plan_text: str) -> str:
    reasons = "".join(f"<li>{escape(str(reason))}</li>" for reason in plan.get("reasons", ()))
    listed = f"<ul>{reasons}</ul>" if reasons else ""
    table = f"<details><summary>as a table</summary><pre>{escape(plan_text)}</pre></details>"
    return plan_picture(plan, colors) + listed + (table if plan_text else "")


def _validation(history: RunHistory) -> str:
    names = scalar_names(history.validation)
    if not names:
        return ""
    others = [name for name in names if name not in _loss_names(history)][:_MAX_VALIDATION_CHARTS]
    charts = [
        line_chart(
            [_series(history.validation, name, name, "var(--c2)", "dots")],
            y_label=name,
            title=name,
        )
        for name in others
    ]
    return section("Validation", validation_table(history.validation) + "".join(charts))


def _outcome(run_dir: RunDirectory) -> dict[str, Any]:
    """How the run stands, from `summary.json` or `status.json`, whichever was written last."""
    try:
        ended = json.loads(_read_text(run_dir.summary_path))
        outcome = {name: ended[name] for name in ("status", "reason", "weights_digest")}
    except (ValueError, KeyError, TypeError):
        outcome = {"status": Status.RUNNING, "reason": "", "weights_digest": None}
    status = read_status(run_dir.status_path)
    if status is not None and _changed_ns(run_dir.status_path) > _changed_ns(run_dir.summary_path):
        outcome |= {"status": status.status, "reason": status.reason}
    return outcome


def _changed_ns(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
