from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from hetero_fw.monitoring import EventLog, EventName, read_events


def test_an_event_is_read_back_with_its_fixed_fields(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    before_s = time.time()
    with EventLog(path, attempt=2, rank=1) as log:
        log.write(EventName.RESTORED, step=7, source="checkpoints/x")
    with EventLog(path, attempt=2) as supervisor:
        supervisor.write("run_end", status="DONE")
    restored, end = read_events(path)
    assert before_s <= restored.pop("time_s") <= time.time()
    assert restored == {
        "attempt": 2,
        "rank": 1,
        "step": 7,
        "event": "restored",
        "source": "checkpoints/x",
    }
    assert (end["rank"], end["step"], end["event"]) == (None, None, "run_end")


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", attempt=0)
    with pytest.raises(ValueError, match="Did you mean 'checkpoint_staged'"):
        log.write("checkpoint_stagd")
    with pytest.raises(ValueError, match=r"\['rank'\] are set by the log"):
        log.write(EventName.FAILURE_DETECTED, **{"rank": 3})
    log.close()
    assert read_events(log.path) == []


def test_values_that_are_no_json_are_written_as_text(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl", attempt=0) as log:
        log.write("step_skipped", grad_norm=float("nan"), path=Path("a/b"), nested=[float("inf")])
    line = log.path.read_text()
    event = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (event["grad_norm"], event["path"], event["nested"]) == ("nan", "a/b", ["inf"])


def test_a_torn_last_line_is_skipped_and_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, attempt=0) as log:
        log.write("plan")
        log.write("attempt_start")
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert [event["event"] for event in read_events(path)] == ["plan"]
    with EventLog(path, attempt=1) as log:
        log.write("run_end")
    assert [event["event"] for event in read_events(path)] == ["plan", "run_end"]


def test_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert read_events(tmp_path / "events.jsonl") == []


def test_foreign_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'\n[1]\n{"a": 1}\n\xff\xfe\n{"event": "plan", "time_s": 1.0}\n')
    assert read_events(path) == [{"event": "plan", "time_s": 1.0}]


def test_lines_of_several_processes_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    script = (
        "import sys; from pathlib import Path; from hetero_fw.monitoring import EventLog\n"
        "log = EventLog(Path(sys.argv[1]), 0, int(sys.argv[2]))\n"
        "for step in range(300): log.write('plan', step=step, text='x' * (step * 37 % 5000))"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", script, str(path), str(rank)]) for rank in range(4)
    ]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    events = read_events(path)
    assert len([line for line in path.read_text().splitlines() if line]) == 1200
    assert Counter(event["rank"] for event in events) == dict.fromkeys(range(4), 300)
    for rank in range(4):
        assert [e["step"] for e in events if e["rank"] == rank] == list(range(300))
    assert all(len(event["text"]) == event["step"] * 37 % 5000 for event in events)
