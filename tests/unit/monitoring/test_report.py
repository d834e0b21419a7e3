from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hetero_fw.monitoring import (
    MetricsWriter,
    RunDirectory,
    RunHistory,
    Status,
    StepRecord,
    build_summary,
    summarize,
    write_report,
    write_status,
    write_summary,
)
from hetero_fw.monitoring.report import render_report

WriteRun = Callable[[], RunDirectory]
VOID = {"meta", "br", "hr", "link", "img", "input"}


class Checker(HTMLParser):
    """Fails on tags that do not nest; collects text, tags and attribute values."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data.strip())


def check(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    # Everything is in the file.
    assert "script" not in checker.tags
    assert not {name for name, _ in checker.attributes} & {"src", "href", "onclick", "onload"}
    assert "http:" not in html
    assert "https:" not in html
    geometry = [value for name, value in checker.attributes if name in {"points", "d", "x", "y"}]
    assert not [value for value in geometry if "nan" in value or "inf" in value]
    return checker


def test_the_report_shows_the_run(write_run: WriteRun, plan: dict[str, Any]) -> None:
    run = write_run()
    summary = build_summary(run, plan_dict=plan, weights_digest="abc123", status="DONE")
    write_summary(run, summary)
    run.plan_text_path.write_text("rank <table>")
    path = write_report(run)
    assert path == run.report_path
    checker = check(path.read_text())
    text = " ".join(checker.text)
    for expected in (
        "short-run",
        "DONE",
        "EMULATED",
        "weights digest abc123",
        "40.0%",  # goodput
        "2.5",  # last loss
        "predicted 800 ms, ratio 1.250",
        "median recovery 3.0 s",
        "median stall 250 ms",
        "1.50 x",  # over the equal split
        "fast: compute",
        "training loss",
        "val_accuracy",
        "checkpoint_committed",
        "<killed> & gone",
        "shares follow speed & memory",
        "rank <table>",
        "3.00 GiB of 12.00 GiB",
        "25 in 800 ms",
        "micro-batches: 1 x 12, 1 x 13",
        "0 to 1",  # ranks of merged events
        "fast-0, slow-0",
    ):
        assert expected in text, expected
    assert checker.tags.count("svg") == 5


def test_the_report_of_a_run_that_left_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "empty")
    run.path.mkdir()
    text = " ".join(check(write_report(run).read_text()).text)
    assert "Nothing was recorded." in text
    assert "There is no plan." in text
    assert "EMULATED" not in text


def test_a_run_that_failed_before_its_first_step(write_run: WriteRun) -> None:
    run = write_run()
    for path in (run.metrics_path, run.lost_metrics_path, run.validation_path):
        path.unlink()
    write_status(run.status_path, Status.FAILED, 0, 1, "rank 1: <out of memory>")
    text = " ".join(check(write_report(run).read_text()).text)
    assert "FAILED" in text
    assert "rank 1: <out of memory>" in text
    assert "no step was completed" in text


def test_the_outcome_is_what_was_written_last(write_run: WriteRun) -> None:
    run = write_run()
    write_status(run.status_path, Status.RUNNING, 4, 1)
    summary = build_summary(run, plan_dict=None, weights_digest="abc", status=Status.DONE)
    write_summary(run, summary)
    os.utime(run.status_path, ns=(1, 1))
    assert '<span class="badge done">DONE</span>' in write_report(run).read_text()
    os.utime(run.summary_path, ns=(0, 0))
    assert '<span class="badge running">RUNNING</span>' in write_report(run).read_text()


def test_everything_is_escaped(write_run: WriteRun, plan: dict[str, Any]) -> None:
    evil = "<script>alert('x')</script>"
    for rank in plan["ranks"]:
        rank.update(node=evil, device=evil, group=evil)
    plan["reasons"] = [evil]
    run = write_run()
    run.plan_path.write_text(json.dumps(plan))
    with run.events_path.open("a") as file:
        line = {"time_s": 111.0, "attempt": 1, "rank": None, "step": 1, "event": "restored"}
        file.write(json.dumps({**line, "source": evil, evil: evil}) + "\n")
    run.validation_path.write_text(f'step,time_s,attempt,"{evil}"\n2,102.0,0,1.0\n')
    check(write_report(run).read_text())


def test_thousands_of_steps_make_a_small_report(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    writer = MetricsWriter(run.metrics_path, ["fast"], attempt=0)
    for step in range(1, 8001):
        writer.write(
            StepRecord(
                step=step,
                loss=math.nan if step == 4000 else 5 / step,
                grad_norm=1.0,
                lr=1e-3,
                num_samples=8,
                num_targets=8,
                step_time_s=9.0 if step == 1 else 0.01,
                memory_bytes=1,
                compute_s_by_group={"fast": 0.009},
            )
        )
    writer.close()
    html = write_report(run).read_text()
    text = " ".join(check(html).text)
    assert len(html) < 200_000
    assert "1 far higher values are cut off" in text


def test_large_plans_show_equal_ranks_as_one_bar(plan: dict[str, Any]) -> None:
    fast, slow = plan["ranks"]
    ranks = [{**fast, "rank": rank, "node": f"n{rank // 8}"} for rank in range(512)]
    ranks += [{**slow, "rank": 512 + rank, "node": "m0"} for rank in range(8)]
    history = RunHistory(plan={**plan, "ranks": ranks})
    summary = summarize(history, weights_digest=None, status="RUNNING")
    checker = check(render_report(history, summary, title="large"))
    text = " ".join(checker.text)
    assert "0 to 511   n0 to n63" in text
    assert "512 to 519   m0" in text


def test_long_pauses_between_attempts_are_cut_out(write_run: WriteRun) -> None:
    run = write_run()
    with run.events_path.open("a") as file:
        for time_s, event in ((90_000.0, "attempt_start"), (90_010.0, "run_end")):
            record = {"time_s": time_s, "attempt": 2, "rank": None, "step": None, "event": event}
            file.write(json.dumps(record) + "\n")
    text = " ".join(check(write_report(run).read_text()).text)
    assert "pause of 24:58:10" in text
    assert "running time, pauses cut out" in text


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_single_step_is_a_dot(write_run: WriteRun, attempt: int) -> None:
    run = write_run()
    lines = run.metrics_path.read_text().splitlines(keepends=True)
    run.metrics_path.write_text("".join(lines[: 1 + attempt + 1]))
    assert "circle" in check(write_report(run).read_text()).tags
