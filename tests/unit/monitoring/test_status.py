from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hetero_fw.monitoring import (
    RunStatus,
    Status,
    read_status,
    write_json_atomically,
    write_status,
    write_text_atomically,
)


def test_the_status_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    assert read_status(path) is None
    write_status(path, Status.RUNNING, 3, 0)
    write_status(path, Status.FAILED, 7, 2, "rank 1 ran out of memory")
    assert json.loads(path.read_text()) == {
        "status": "FAILED",
        "step": 7,
        "attempt": 2,
        "reason": "rank 1 ran out of memory",
    }
    expected = RunStatus(status=Status.FAILED, step=7, attempt=2, reason="rank 1 ran out of memory")
    assert read_status(path) == expected
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"status": "LOST", "step": 1}'])
def test_what_is_no_status_reads_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    assert read_status(tmp_path / "status.json") is None


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.txt"
    write_text_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text_atomically(path, "new \udc80")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.txt"]  # noqa: PTH208


def test_json_is_strict(tmp_path: Path) -> None:
    write_json_atomically(tmp_path / "a.json", {"loss": float("nan"), "path": Path("x")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"loss": "nan", "path": "x"}
