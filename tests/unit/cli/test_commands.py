"""The `hetero` command."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from hetero_fw.cli import main
from hetero_fw.monitoring import (
    EventLog,
    EventName,
    RunDirectory,
    Status,
    create_run_directory,
    write_json_atomically,
    write_status,
)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(arguments) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run_dir = create_run_directory(tmp_path, "mine")
    write_json_atomically(run_dir.plan_path, {"emulation": {"dilation": 2}, "ranks": []})
    return run_dir


def test_plan_is_for_the_declared_devices(capsys: pytest.CaptureFixture[str]) -> None:
    plan = run_json(
        capsys, "plan", "hardware=a100_v100_mix", "--json", "data.global_batch_size=4096"
    )
    assert plan["emulation"] is None
    assert plan["global_batch_size"] == 4096
    assert sum(rank["num_samples"] for rank in plan["ranks"]) == 4096


def test_plan_of_an_emulation_and_of_a_cluster_that_cannot_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = ["hardware=a100_v100_mix", "hardware.emulation.host_flops_per_s=1e10"]
    plan = run_json(capsys, "plan", "--json", "hardware.emulate=always", *overrides)
    assert plan["emulation"]["host_flops_per_s"] == 1e10
    assert main(["plan", "hardware=gpu_tpu_mix", "data.global_batch_size=1024"]) == 0
    assert "tpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "hardware=a100_v100_mx", "+typo=1"], "2 problems in the configuration"),
        (["plan", "hardware=a100_v100_mix", "model.module.model_dim=100000"], "No plan fits"),
    ],
)
def test_bad_configurations(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["paln"],
        ["plan", "--jsn"],
        ["doctor", "x=1"],
        ["status"],
        ["status", "nowhere"],
        ["report", "."],
    ],
)
def test_bad_arguments_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("hetero")
    assert len(errors.splitlines()) == 1


def test_status_of_a_plan(capsys: pytest.CaptureFixture[str], run: RunDirectory) -> None:
    description = run_json(capsys, "status", "--json", str(run.path))
    assert description["status"] == "PLANNED"
    assert description["is_emulated"] is True
    assert main(["status", str(run.path)]) == 0
    assert "EMULATED" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["[]", "{", '"plan"'])
def test_status_of_a_run_with_a_damaged_plan(
    capsys: pytest.CaptureFixture[str], run: RunDirectory, text: str
) -> None:
    run.plan_path.write_text(text)
    assert run_json(capsys, "status", "--json", str(run.path))["is_emulated"] is False


def test_status_of_a_run(capsys: pytest.CaptureFixture[str], run: RunDirectory) -> None:
    write_status(run.status_path, Status.RUNNING, 7, 1)
    (run.checkpoints_path / "hetero_ckpt-step-00000005").mkdir(parents=True)
    (run.checkpoints_path / "hetero_ckpt-step-00000005" / "manifest.json").touch()
    (run.checkpoints_path / "hetero_ckpt-step-00000006").mkdir()
    with EventLog(run.events_path, 1) as events:
        events.write(EventName.RESTART, step=5)
    assert run_json(capsys, "status", "--json", str(run.path))["status"] == "INTERRUPTED"
    with run.lock_path.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        description = run_json(capsys, "status", "--json", str(run.path))
    assert description["status"] == "RUNNING"
    assert description["step"] == 7
    assert description["num_restarts"] == 1
    assert description["newest_checkpoint"] == "hetero_ckpt-step-00000005"


def test_status_names_a_newer_checkpoint_on_the_nodes(
    capsys: pytest.CaptureFixture[str], run: RunDirectory, tmp_path: Path
) -> None:
    (run.checkpoints_path / "hetero_ckpt-step-00000005").mkdir(parents=True)
    (run.checkpoints_path / "hetero_ckpt-step-00000005" / "manifest.json").touch()
    newer = tmp_path / "memory" / "hetero_ckpt-step-00000009"
    newer.mkdir(parents=True)
    with EventLog(run.events_path, 0) as events:
        for path in (newer, newer.with_name("hetero_ckpt-step-00000012")):
            events.write(EventName.CHECKPOINT_COMMITTED, path=str(path), tier="local")
    description = run_json(capsys, "status", "--json", str(run.path))
    assert description["newest_checkpoint"] == "hetero_ckpt-step-00000009"
    newer.rmdir()
    description = run_json(capsys, "status", "--json", str(run.path))
    assert description["newest_checkpoint"] == "hetero_ckpt-step-00000005"


def test_report(capsys: pytest.CaptureFixture[str], run: RunDirectory) -> None:
    assert main(["report", str(run.path)]) == 0
    assert capsys.readouterr().out.strip() == str(run.report_path)
    assert "<html" in run.report_path.read_text()


def test_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = run_json(capsys, "doctor", "--json", "--root", str(tmp_path / "runs"))
    assert result["ready"] is True
    subjects = {finding["subject"] for finding in result["findings"]}
    assert {"python", "torch", "backends", "gpus", "output root", "/dev/shm"} <= subjects
    assert {"hydra plugins", "processor", "packages"} <= subjects
    assert list(tmp_path.iterdir()) == []


def test_doctor_finds_a_root_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert main(["doctor", "--root", str(tmp_path / "file" / "runs")]) == 1
    output = capsys.readouterr().out
    assert "problem  output root" in output
    assert "1 to solve before training" in output
