"""`hetero ckpt ls` and `verify` of a run whose checkpoints are in node directories as well."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hetero_fw.checkpoint import HashAlgorithm, checkpoint_path
from hetero_fw.cli import main
from hetero_fw.monitoring import EventLog, RunDirectory, create_run_directory, write_json_atomically
from tests.unit.checkpoint.examples import PREFIX, fill
from tests.unit.checkpoint.node_directories import (
    copy_of,
    damage,
    note_incidents,
    shard,
    write_copies,
)

HOLDERS = {"a100-0": (0, 1), "v100-0": (1, 0)}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Steps 10 and 20 are in the storage, 20 and 30 on the nodes, hashed in one way or another."""
    run_dir = create_run_directory(tmp_path, "mine")
    write_json_atomically(run_dir.plan_path, {"ranks": []})
    run_dir.hydra_path.mkdir()
    text = f"ckpt: {{prefix: {PREFIX}, storage: null, tiers: {{local: {tmp_path / 'memory'}}}}}\n"
    (run_dir.hydra_path / "config.yaml").write_text(text)
    fill(run_dir.checkpoints_path, [10, 20], size=10, algorithm=HashAlgorithm.SHA256)
    for step, algorithm in ((20, HashAlgorithm.XXH3_128), (30, HashAlgorithm.BLAKE2B)):
        write_copies(local(run_dir), step, HOLDERS, algorithm=algorithm)
    return run_dir


def local(run: RunDirectory) -> Path:
    return run.path.parent / "memory" / run.name


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    assert main(["ckpt", *arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_ls_has_a_line_for_each_tier(capsys: pytest.CaptureFixture[str], run: RunDirectory) -> None:
    rows = run_json(capsys, "ls", str(run.path))
    found = [(row["step"], row["tier"]) for row in rows]
    assert found == [(30, "local"), (20, "local"), (20, "storage"), (10, "storage")]
    assert rows[0]["nodes"] == ["a100-0", "v100-0"]
    assert (rows[0]["missing"], rows[0]["num_copies"]) == ([], 2)
    assert rows[0]["path"] == str(copy_of(local(run), "a100-0", 30))
    assert rows[2]["nodes"] is rows[2]["missing"] is None
    assert {row["is_verified"] for row in rows} == {None}
    assert main(["ckpt", "ls", str(run.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["step", "age", "size", "tier", "verified"]
    assert "local x2  not read" in lines[1]
    assert "after 30" in lines[1]
    assert "storage   not read" in lines[3]


def test_ls_says_what_a_later_attempt_has_left_behind(
    capsys: pytest.CaptureFixture[str], run: RunDirectory
) -> None:
    with EventLog(run.events_path, 2) as events:
        events.write("attempt_start")
        events.write("restored", step=10)
        events.write("checkpoint_committed", step=20, tier="storage")
    rows = run_json(capsys, "ls", str(run.path))
    left = "step 30 of attempt 1 is passed over: attempt 2 went on from step 10"
    assert rows[0]["departure"] == left
    assert rows[-1]["departure"] is None
    assert main(["ckpt", "ls", str(run.path)]) == 0
    assert left in capsys.readouterr().out.splitlines()[1]


def test_ls_names_the_parts_that_are_not_seen_from_here(
    capsys: pytest.CaptureFixture[str], run: RunDirectory
) -> None:
    for node in HOLDERS:
        (copy_of(local(run), node, 30) / shard(1)).unlink()
    rows = run_json(capsys, "ls", str(run.path))
    assert rows[0]["missing"] == [shard(1)]
    assert main(["ckpt", "ls", str(run.path)]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert "INCOMPLETE" in line
    assert "shard-00001.bin not in the directories seen from here (a100-0, v100-0)" in line


def test_verify_reads_the_union_of_the_nodes(
    capsys: pytest.CaptureFixture[str], run: RunDirectory
) -> None:
    assert {row["is_verified"] for row in run_json(capsys, "verify", str(run.path))} == {True}
    damage(copy_of(local(run), "a100-0", 30) / shard(1))
    # Another copy is sound, and one is damaged all the same.
    rows = run_json(capsys, "verify", str(run.path), "--step", "30", status=1)
    assert [row["tier"] for row in rows] == ["local"]
    assert rows[0]["is_verified"] is True
    assert "a100-0" in rows[0]["problem"]
    damage(copy_of(local(run), "v100-0", 30) / shard(1))
    rows = run_json(capsys, "verify", str(run.path), status=1)
    assert [row["is_verified"] for row in rows] == [False, True, True, True]
    assert main(["ckpt", "verify", str(run.path), "--step", "40"]) == 2
    assert "no checkpoint of step 40" in capsys.readouterr().err


def test_a_run_whose_nodes_are_gone(capsys: pytest.CaptureFixture[str], run: RunDirectory) -> None:
    shutil.rmtree(local(run))
    assert [row["step"] for row in run_json(capsys, "ls", str(run.path))] == [20, 10]


def test_a_quarantined_checkpoint_says_why(
    capsys: pytest.CaptureFixture[str], run: RunDirectory
) -> None:
    note_incidents(run.checkpoints_path, 20, [2, 3])
    rows = run_json(capsys, "ls", str(run.path))
    assert [row["quarantine"] is not None for row in rows] == [False, True, True, False]
    assert main(["ckpt", "verify", str(run.path)]) == 0
    out = capsys.readouterr().out
    assert out.count("quarantined: after restoring it the loss was not finite") == 2
    assert checkpoint_path(run.checkpoints_path, PREFIX, 20).is_dir()
