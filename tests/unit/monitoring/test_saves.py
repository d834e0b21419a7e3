"""What the summary and the report say about saves to several tiers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hetero_fw.monitoring import RunDirectory, RunHistory, read_history, summarize
from hetero_fw.monitoring.report import render_report

WriteRun = Callable[[], RunDirectory]


def event(name: str, time_s: float, step: int | None, **fields: Any) -> dict[str, Any]:
    return {"time_s": time_s, "attempt": 1, "rank": 0, "step": step, "event": name, **fields}


def staged(time_s: float, step: int, stall_s: float) -> list[dict[str, Any]]:
    return [
        {**event("checkpoint_staged", time_s, step, stall_s=stall_s / (2 - rank)), "rank": rank}
        for rank in (0, 1)
    ]


def committed(time_s: float, step: int, tier: str, stall_s: float, persist_s: float) -> Any:
    costs = {"stall_s": stall_s, "persist_s": persist_s, "bytes": 1000 * step}
    return event("checkpoint_committed", time_s, step, tier=tier, path=f"{tier}/x", **costs)


TWO_TIERS = (
    *staged(107.6, 5, 0.02),
    committed(107.7, 5, "local", 0.02, 0.1),
    *staged(108.0, 6, 0.04),
    committed(108.1, 6, "local", 0.04, 0.3),
    committed(108.6, 6, "storage", 0.0, 0.5),
    event(
        "checkpoint_postponed",
        108.3,
        7,
        tier="storage",
        in_flight_tier="storage",
        in_flight_step=6,
        reason="postponed, the last save is in flight",
    ),
    *staged(108.7, 7, 0.06),
    event(
        "checkpoint_failed",
        108.8,
        7,
        tier="local",
        reason="no copy on node <b>",
        message="checkpoint of step 7 failed: no copy on node <b>; step 6 is safe",
        safe_step=6,
    ),
    {**event("checkpoint_failed", 108.9, 7, tier="local", reason="store lost"), "rank": 1},
    committed(109.0, 7, "storage", 0.0, 0.7),
    event("writer_restart", 109.1, None, tier="storage", reason="it was killed by SIGKILL"),
    event("writer_restart", 109.2, None, tier="storage", reason="it was killed by SIGTERM"),
    event("checkpoint_rejected", 109.3, 4, path="storage/y", reason="y: it is quarantined: after"),
    event("checkpoint_rejected", 109.4, 3, path="storage/z", reason="z: has 3 bytes"),
)


@pytest.fixture
def history(write_run: WriteRun) -> RunHistory:
    """The short run, but with saves to two tiers."""
    plain = read_history(write_run())
    others = [e for e in plain.events if not e["event"].startswith("checkpoint_")]
    return replace(plain, events=(*others, *TWO_TIERS))


def test_a_save_to_two_tiers_counts_once(history: RunHistory) -> None:
    summary = summarize(history, weights_digest=None, status="DONE")
    assert summary["num_checkpoints"] == 3
    assert summary["checkpoint_stall_s"] == pytest.approx([0.02, 0.04, 0.06])
    assert summary["checkpoint_tiers"] == {
        "local": {
            "num_committed": 2,
            "num_failed": 1,
            "stall_s": pytest.approx(0.03),
            "persist_s": pytest.approx(0.2),
            "size_bytes": 6000,
        },
        "storage": {
            "num_committed": 2,
            "num_failed": 0,
            "stall_s": 0.0,
            "persist_s": pytest.approx(0.6),
            "size_bytes": 7000,
        },
    }
    assert summary["num_failed_saves"] == 1
    assert summary["num_writer_restarts"] == 2
    assert summary["quarantined_steps"] == [4]


def test_tiers_change_nothing_else(history: RunHistory, write_run: WriteRun) -> None:
    summary = summarize(history, weights_digest=None, status="DONE")
    plain = summarize(
        replace(history, events=tuple(e for e in history.events if e not in TWO_TIERS)),
        weights_digest=None,
        status="DONE",
    )
    differing = {name for name in summary if summary[name] != plain[name]}
    assert differing == {
        "num_checkpoints",
        "checkpoint_stall_s",
        "checkpoint_tiers",
        "num_failed_saves",
        "num_writer_restarts",
        "quarantined_steps",
    }
    assert summary["goodput"] == pytest.approx(0.4)


def test_an_upload_after_the_last_step_is_wall_time(history: RunHistory) -> None:
    late = committed(114.0, 7, "storage", 0.0, 5.0)
    summary = summarize(
        replace(history, events=(*history.events, late)), weights_digest=None, status="DONE"
    )
    assert summary["num_checkpoints"] == 3
    assert summary["goodput"] == pytest.approx(4 / 14)


def test_events_without_a_tier_are_of_the_storage(write_run: WriteRun) -> None:
    summary = summarize(read_history(write_run()), weights_digest=None, status="DONE")
    assert list(summary["checkpoint_tiers"]) == ["storage"]
    assert summary["checkpoint_tiers"]["storage"]["num_committed"] == 2
    assert (summary["num_failed_saves"], summary["quarantined_steps"]) == (0, [])


def test_the_report_has_a_row_for_each_tier_and_each_trouble(history: RunHistory) -> None:
    summary = summarize(history, weights_digest=None, status="DONE")
    html = render_report(history, summary, title="x")
    section = html.partition("<h2>Checkpoints</h2>")[2].partition("</section>")[0]
    rows = [row.replace("<td class=number>", "<td>") for row in section.split("<tr>")]
    assert [row for row in rows if row.startswith("<td>local</td><td>2</td><td>1</td>")]
    assert [row for row in rows if row.startswith("<td>storage</td><td>2</td><td>0</td>")]
    assert section.count("<td>save failed</td>") == 1
    assert "no copy on node &lt;b&gt;; step 6 is safe" in section
    assert section.count("<td>quarantined</td>") == 1
    assert section.count("<td>rejected</td>") == 1
    assert section.count("<td>writer restarted</td>") == 2
    events = html.partition("<h2>Events</h2>")[2]
    assert events.count("killed by SIG") == 2
    assert events.count("tier=local") == 3  # the two reports of one failure are one row
    assert "tier=local, storage" not in events
    assert "median stall 40 ms, 1 failed" in html


def test_a_run_that_saved_nothing_has_no_such_section(history: RunHistory) -> None:
    bare = replace(history, events=tuple(e for e in history.events if e not in TWO_TIERS))
    summary = summarize(bare, weights_digest=None, status="DONE")
    assert "<h2>Checkpoints</h2>" not in render_report(bare, summary, title="x")
