"""What is refused and what is written before any process starts."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig

from hetero_fw.app import compose_checked, run
from hetero_fw.app.entry import PRELOAD_VARIABLE
from hetero_fw.app.left_places import check_left_places
from hetero_fw.app.run import (
    _host_flops,
    _is_done,
    _preload,
    _previous_run,
    _with_nodes,
)
from hetero_fw.app.storage_settings import StoredRun
from hetero_fw.errors import ConfigError
from hetero_fw.monitoring import EventLog, RunDirectory, Status, write_status
from tests.unit.checkpoint.node_directories import copy_of, shard, write_copies

EMULATED = ("hardware=a100_v100_mix", "hardware.emulation.host_flops_per_s=1e10")


def config(root: Path, *overrides: str) -> DictConfig:
    return compose_checked([f"paths.root={root}", "run_name=run", *EMULATED, *overrides])


def checkpoint(root: Path, step: int) -> None:
    folder = root / "run" / "checkpoints" / f"hetero_ckpt-step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def test_plan_mode_writes_the_plan_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    had_torch = "torch" in sys.modules
    assert run(config(tmp_path, "mode=plan")) == 0
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert sum(rank["num_samples"] for rank in plan["ranks"]) == 56
    printed = capsys.readouterr().out
    assert (tmp_path / "run" / "plan.txt").read_text().strip() in printed
    assert "EMULATED" in printed
    written = {path.name for path in (tmp_path / "run").iterdir()}
    assert not written & {"events.jsonl", "status.json", "metrics.csv", "attempts", "checkpoints"}
    assert had_torch or "torch" not in sys.modules


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("resume=must",), ("resume=must", "that directory does not exist")),
        (("data.paths=/nowhere/*.txt",), ("data.paths", "/nowhere/*.txt")),
        (("hardware.emulate=never",), ("hardware.emulate=never", "a100-80gb")),
        (("parallel=uniform", "hardware.groups.v100.memory_gib=0.5"), ("v100", "GiB")),
    ],
    ids=lambda value: " ".join(value),
)
def test_refused_with_one_message_and_nothing_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    assert run(config(tmp_path, *overrides)) == 2
    told = capsys.readouterr().err
    for word in words:
        assert word in told
    assert "Traceback" not in told
    assert not list(tmp_path.iterdir())


def test_too_few_nodes_for_the_copies_are_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = ("ckpt.tiers.local=/dev/shm/x", "ckpt.min_replica_size=3")
    assert run(config(tmp_path, *wanted)) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert "1 problem" in told
    assert "ckpt.min_replica_size=3 needs as many nodes" in told
    assert "the plan has 2" in told
    assert not list(tmp_path.iterdir())


def test_root_that_cannot_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(config(Path("/proc/outputs"), "mode=plan")) == 2
    assert "/proc/outputs" in capsys.readouterr().err


def test_root_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run(config(tmp_path / "file", "mode=plan")) == 2
    assert "file" in capsys.readouterr().err


def test_resume_never_protects_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(tmp_path, 6)
    checkpoint(tmp_path, 12)
    assert run(config(tmp_path, "mode=plan", "resume=never")) == 2
    assert "holds 2 checkpoints" in capsys.readouterr().err
    assert run(config(tmp_path, "mode=plan", "resume=must")) == 0


def test_what_the_nodes_hold_counts_where_the_run_directory_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, local = tmp_path / "out", tmp_path / "memory"
    wanted = (f"ckpt.tiers.local={local}", "mode=plan")
    assert run(config(root, *wanted, "resume=must")) == 2
    assert "no checkpoint to continue from" in capsys.readouterr().err
    for node in ("a100-0", "v100-0"):
        (local / "run" / node / ".staging-3").mkdir(parents=True)
        folder = local / "run" / node / "hetero_ckpt-step-00000006"
        folder.mkdir()
        (folder / "manifest.json").write_text("{}")
    assert run(config(root, *wanted, "resume=never")) == 2
    told = capsys.readouterr().err
    assert f"{local}/run holds 1 checkpoints" in told
    assert run(config(root, *wanted, "resume=must")) == 0
    stored = _with_nodes(config(root, *wanted), StoredRun(num_attempts=2))
    assert stored == StoredRun(checkpoints=("hetero_ckpt-step-00000006",), num_attempts=4)


def test_finished_run_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_status(folder / "status.json", Status.DONE, 7, 0)
    assert run(config(tmp_path, "trainer.max_steps=7")) == 0
    assert "is DONE" in capsys.readouterr().out
    assert not _is_done(config(tmp_path, "trainer.max_steps=8"), RunDirectory(folder))
    write_status(folder / "status.json", Status.PREEMPTED, 7, 0)
    assert not _is_done(config(tmp_path, "trainer.max_steps=7"), RunDirectory(folder))


def test_a_last_step_that_is_on_the_nodes_alone_is_something_left_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local, run_dir = tmp_path / "memory", RunDirectory(tmp_path / "out" / "run")
    cfg = config(tmp_path / "out", "trainer.max_steps=7", f"ckpt.tiers.local={local}")
    run_dir.path.mkdir(parents=True)
    write_status(run_dir.status_path, Status.DONE, 7, 0)
    write_copies(local / "run", 7, {"a100-0": (0, 1), "v100-0": (1, 0)})
    assert not _is_done(cfg, run_dir)
    assert "which the storage lacks" in capsys.readouterr().out
    (copy_of(local / "run", "a100-0", 7) / shard(1)).unlink()
    assert not _is_done(cfg, run_dir)
    (copy_of(local / "run", "v100-0", 7) / shard(1)).unlink()
    assert _is_done(cfg, run_dir)  # what is not whole would be trained again
    write_copies(local / "run", 7, {"a100-1": (0, 1)}, attempt=2)
    assert not _is_done(cfg, run_dir)
    with EventLog(run_dir.events_path, 2) as events:
        events.write("checkpoint_committed", step=7, tier="storage")
    assert _is_done(cfg, run_dir)


def test_run_keeps_the_pace_it_began_with(tmp_path: Path) -> None:
    assert _previous_run(config(tmp_path)) is None
    assert _host_flops(None) is None
    assert run(config(tmp_path, "mode=plan")) == 0
    previous = _previous_run(config(tmp_path))
    assert previous is not None
    assert _host_flops(previous) == 1e10


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "7", '{"emulation": 3}', '{"emulation": {"host_flops_per_s": NaN}}', "\udcff"],
)
def test_a_damaged_plan_sets_no_pace(tmp_path: Path, text: str) -> None:
    run_dir = RunDirectory(tmp_path)
    run_dir.plan_path.write_bytes(text.encode(errors="surrogateescape"))
    assert _host_flops(run_dir) is None
    assert _host_flops(RunDirectory(tmp_path / "absent")) is None


def test_modules_of_the_user_are_preloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRELOAD_VARIABLE, "")
    assert _preload(config(tmp_path)) == ["hetero_fw.app.preload"]
    modules = os.environ[PRELOAD_VARIABLE].split(",")
    assert {"recipes.gpt", "hetero_fw.data", "torch.optim"} == set(modules)
    _preload(config(tmp_path, "optim=module"))
    assert "torch.optim" not in os.environ[PRELOAD_VARIABLE]


def earlier_run(root: Path, step: int, **ckpt: object) -> None:
    """What a run has left behind that has saved `step` in its run directory, and ended."""
    checkpoint(root, step)
    (root / "run" / ".hydra").mkdir()
    text = json.dumps({"ckpt": {"storage": None, "prefix": "hetero_ckpt", **ckpt}})
    (root / "run" / ".hydra" / "config.yaml").write_text(text)
    with EventLog(root / "run" / "events.jsonl", 0) as events:
        events.write("attempt_start")
        events.write("checkpoint_committed", step=step)


def test_a_changed_storage_is_no_silent_fresh_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, other = tmp_path / "out", tmp_path / "other"
    earlier_run(root, 90)
    before = sorted(root.rglob("*"))
    for resume in ("auto", "must"):
        assert run(config(root, f"ckpt.storage={other}", f"resume={resume}")) == 2
        told = capsys.readouterr().err
        assert len(told.splitlines()) == 1
        for word in (
            f"has its checkpoints in {root}/run/checkpoints, the newest of step 90",
            f"there is none in {other}/run",
            "begin at step 0 again",
            "set ckpt.storage=null,",
            "another run_name",
        ):
            assert word in told
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize("prefix", ["hetero_ckpt", "other"])
def test_never_leaves_no_checkpoints_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prefix: str
) -> None:
    root, other = tmp_path / "out", tmp_path / "other"
    earlier_run(root, 90, storage=str(tmp_path / "third"))
    before = sorted(root.rglob("*"))
    wanted = (f"ckpt.storage={other}", f"ckpt.prefix={prefix}", "resume=never")
    assert run(config(root, *wanted)) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    for word in (
        f"has checkpoints of an earlier run in {root}/run/checkpoints, the newest of step 90",
        "another run_name",
    ):
        assert word in told
    assert sorted(root.rglob("*")) == before
    shutil.rmtree(root / "run" / "checkpoints")
    assert judge(root, *wanted) == ""


def judge(root: Path, *overrides: str, checkpoints: tuple[int, ...] = ()) -> str:
    names = tuple(f"hetero_ckpt-step-{step:08d}" for step in checkpoints)
    cfg = config(root, *overrides)
    return check_left_places(cfg, _previous_run(cfg), StoredRun(checkpoints=names))


def test_a_remote_storage_is_left_by_what_was_saved_there(tmp_path: Path) -> None:
    earlier_run(tmp_path, 90, storage="s3://bucket/runs")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(ConfigError, match=r"in s3://bucket/runs/run, the newest of step 90"):
        judge(tmp_path)
    assert judge(tmp_path, "ckpt.storage=s3://bucket/runs", checkpoints=(90,)) == ""
    with pytest.raises(ConfigError, match=r"resume=never, but .* in s3://bucket/runs/run, .* 90"):
        judge(tmp_path, "resume=never")
    assert judge(tmp_path, "mode=plan") == ""


def test_a_place_that_holds_older_ones_is_taken_with_a_warning(tmp_path: Path) -> None:
    earlier_run(tmp_path, 90)
    changed = "ckpt.storage=/elsewhere"
    told = judge(tmp_path, changed, checkpoints=(40, 50))
    assert f"{tmp_path}/run/checkpoints holds step 90" in told
    assert "goes on from step 50 now. With ckpt.storage=null" in told
    assert judge(tmp_path, changed, checkpoints=(50, 90)) == ""
    assert judge(tmp_path, checkpoints=(90,)) == ""


def test_nodes_and_prefixes_are_places_too(tmp_path: Path) -> None:
    local = tmp_path / "memory"
    for node in ("a100-0", "v100-0"):
        folder = local / "run" / node / "hetero_ckpt-step-00000120"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    root = tmp_path / "out"
    earlier_run(root, 90, tiers={"local": str(local)})
    told = judge(root, checkpoints=(90,))
    assert f"{local}/run holds step 120" in told
    assert f"With ckpt.tiers.local={local} it" in told
    assert judge(root, f"ckpt.tiers.local={local}", checkpoints=(90, 120)) == ""
    with pytest.raises(
        ConfigError, match=r"ckpt\.tiers\.local=\S+ ckpt\.prefix=hetero_ckpt"
    ) as told:
        judge(root, "ckpt.prefix=other")
    assert f"there is none named other-step-... in {root}/run/checkpoints" in str(told.value)


def test_checkpoints_that_are_gone_are_told(tmp_path: Path) -> None:
    earlier_run(tmp_path, 90)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    told = judge(tmp_path, "ckpt.storage=/elsewhere")
    assert "step 90 was saved, but no checkpoint is left in /elsewhere/run" in told
    assert "begins at step 0 again" in told


def test_a_finished_run_may_name_any_storage(tmp_path: Path) -> None:
    earlier_run(tmp_path, 90)
    write_status(tmp_path / "run" / "status.json", Status.DONE, 90, 0)
    assert judge(tmp_path, "ckpt.storage=/elsewhere", "trainer.max_steps=90") == ""


DAMAGED = (
    b"\xff\xfe",
    b"",
    b"{",
    b"7",
    b"ckpt: {storage: [1]}",
    b"ckpt: {storage: '${nope}'}",
    b"ckpt: {prefix: []}",
    b"ckpt: {tiers: 5}",
    b"ckpt: {tiers: {local: {}}}",
)


@pytest.mark.parametrize("content", DAMAGED)
def test_a_configuration_that_cannot_be_read_hides_no_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    root = tmp_path / "out"
    earlier_run(root, 90)
    path = root / "run" / ".hydra" / "config.yaml"
    path.write_bytes(content)
    told = judge(root, checkpoints=(90,))
    assert told.startswith(f"Warning: {path} cannot be used (")
    assert "goes on from step 90" in told
    shutil.rmtree(root / "run" / "checkpoints")
    for resume in ("auto", "never"):
        assert run(config(root, f"resume={resume}")) == 2
        told = capsys.readouterr().err
        assert len(told.splitlines()) == 1
        assert f"{path} cannot be used (" in told
    path.unlink()
    assert "begins at step 0 again" in judge(root)
