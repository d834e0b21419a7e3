"""`hetero ckpt`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hetero_fw.checkpoint import Metric, checkpoint_path
from hetero_fw.cli import main
from hetero_fw.monitoring import RunDirectory, create_run_directory, write_json_atomically
from tests.unit.checkpoint.examples import WAIT_S, make_newer, make_saver, published, weights

PREFIX = "hetero_ckpt"


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    assert main(["ckpt", *arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["ckpt", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hetero ckpt: ")
    assert len(captured.err.splitlines()) == 1
    return captured.err


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with checkpoints of four steps, the best one at step 10."""
    run_dir = create_run_directory(tmp_path, "mine")
    write_json_atomically(run_dir.plan_path, {"ranks": []})
    run_dir.hydra_path.mkdir()
    (run_dir.hydra_path / "config.yaml").write_text(
        f"ckpt: {{prefix: {PREFIX}, monitor: val_loss, monitor_mode: min, keep_best: 1}}\n"
    )
    saver = make_saver(run_dir.checkpoints_path)
    for step in (10, 20, 30, 40):
        metric = Metric(name="val_loss", value=step / 100)
        handle = saver.save(step, weights(step, 50), {}, reason=f"after {step}", metric=metric)
        assert handle.wait(WAIT_S)
    return run_dir


def damage(run: RunDirectory, step: int) -> None:
    shard = checkpoint_path(run.checkpoints_path, PREFIX, step) / "shard-00000.bin"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)


def test_ls(capsys: pytest.CaptureFixture[str], run: RunDirectory) -> None:
    rows = run_json(capsys, "ls", str(run.path))
    assert [row["step"] for row in rows] == [40, 30, 20, 10]
    assert rows[0]["metric"] == {"name": "val_loss", "value": 0.4}
    assert rows[0]["reason"] == "after 40"
    assert rows[0]["size_bytes"] > 600
    assert 0 <= rows[0]["age_s"] < 60
    assert [row["is_verified"] for row in rows] == [None] * 4
    assert main(["ckpt", "ls", str(run.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "step",
        "age",
        "size",
        "tier",
        "verified",
        "metric",
        *["why", "it", "was", "saved"],
    ]
    assert "not read  val_loss 0.4" in lines[1]


def test_ls_shows_what_cannot_be_printed_by_its_code(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_dir = create_run_directory(tmp_path, "mine")
    write_json_atomically(run_dir.plan_path, {"ranks": []})
    saver = make_saver(run_dir.checkpoints_path)
    handle = saver.save(10, weights(10, 50), {}, reason="é \ud800\x1b[31m\n")
    assert handle.wait(WAIT_S)
    assert main(["ckpt", "ls", str(run_dir.path)]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == 2
    assert shown.endswith("é \\ud800\\x1b[31m\\n\n")


def test_ls_shows_what_is_damaged(capsys: pytest.CaptureFixture[str], run: RunDirectory) -> None:
    damage(run, 30)
    (checkpoint_path(run.checkpoints_path, PREFIX, 20) / "manifest.json").write_text("{}")
    rows = run_json(capsys, "ls", str(run.path), "--verify")
    assert [row["is_verified"] for row in rows] == [True, False, False, True]
    assert "shard-00000.bin" in rows[1]["problem"]
    assert "manifest.json" in rows[2]["problem"]
    assert main(["ckpt", "ls", str(run.path)]) == 0
    assert capsys.readouterr().out.count("DAMAGED") == 1  # the bytes of the other were not read


def test_verify(capsys: pytest.CaptureFixture[str], run: RunDirectory) -> None:
    assert len(run_json(capsys, "verify", str(run.path))) == 4
    damage(run, 30)
    rows = run_json(capsys, "verify", str(run.path), status=1)
    assert [row["step"] for row in rows if not row["is_verified"]] == [30]
    assert len(run_json(capsys, "verify", str(run.path), "--step", "40")) == 1
    assert main(["ckpt", "verify", str(run.path), "--step", "30"]) == 1
    assert "DAMAGED" in capsys.readouterr().out
    assert "no checkpoint of step 31; there are [10, 20, 30, 40]" in complaint(
        capsys, "verify", str(run.path), "--step", "31"
    )


def test_export(capsys: pytest.CaptureFixture[str], run: RunDirectory, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    assert run_json(capsys, "export", str(run.path), "--step", "20", str(out))["num_tensors"] == 3
    exported = load_file(out)
    assert sorted(exported) == ["count", "flags", "weight"]
    assert int(exported["count"]) == 20
    assert "exists already" in complaint(capsys, "export", str(run.path), str(out))


def test_import(capsys: pytest.CaptureFixture[str], run: RunDirectory, tmp_path: Path) -> None:
    weights = {"weight": torch.ones(50, 3), "count": torch.tensor(7), "flags": torch.ones(5).bool()}
    torch.save({"state_dict": weights}, tmp_path / "weights.pt")
    out = tmp_path / "out.safetensors"
    arguments = ("import", str(tmp_path / "weights.pt"), str(out))
    assert run_json(capsys, *arguments, "--like", str(run.path))["num_tensors"] == 3
    assert int(load_file(out)["count"]) == 7
    assert "exists already" in complaint(capsys, *arguments)
    out.unlink()
    assert main(["ckpt", *arguments]) == 0
    assert f"model.init_from={out}" in capsys.readouterr().out


def test_an_import_that_does_not_fit_is_refused(
    capsys: pytest.CaptureFixture[str], run: RunDirectory, tmp_path: Path
) -> None:
    torch.save({"wieght": torch.ones(50, 3)}, tmp_path / "weights.pt")
    out = tmp_path / "out.safetensors"
    error = complaint(
        capsys, "import", str(tmp_path / "weights.pt"), str(out), "--like", str(run.path)
    )
    assert "checkpoint of step 40" in error
    assert "Did you mean 'weight'" in error
    assert "cannot be read" in complaint(capsys, "import", str(tmp_path / "absent"), str(out))
    assert not out.exists()


def test_export_takes_the_newest_that_is_intact(
    capsys: pytest.CaptureFixture[str], run: RunDirectory, tmp_path: Path
) -> None:
    damage(run, 40)
    out = tmp_path / "out.safetensors"
    assert main(["ckpt", "export", str(run.path), str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 3 tensors of hetero_ckpt-step-00000030\n"
    error = complaint(capsys, "export", str(run.path), "--step", "40", str(tmp_path / "other"))
    assert "shard-00000.bin" in error
    assert not (tmp_path / "other").exists()
    for step in (10, 20, 30):
        damage(run, step)
    error = complaint(capsys, "export", str(run.path), str(tmp_path / "other"))
    assert "step-00000040" in error


def test_prune_keeps_the_newest_and_the_best(
    capsys: pytest.CaptureFixture[str], run: RunDirectory
) -> None:
    result = run_json(capsys, "prune", str(run.path), "--keep", "2")
    assert result["deleted"] == ["hetero_ckpt-step-00000020"]
    assert "steps [10] best by val_loss" in result["reason"]
    assert [name[-2:] for name in published(run.checkpoints_path)] == ["10", "30", "40"]
    hidden = {path.name for path in run.checkpoints_path.glob(".*")}
    assert hidden == {".staging-1", ".retired-1"}
    assert main(["ckpt", "prune", str(run.path), "--keep", "2"]) == 0
    assert "keep [40, 30, 10]" in capsys.readouterr().out


def test_prune_refuses_a_rule_that_is_none(
    capsys: pytest.CaptureFixture[str], run: RunDirectory
) -> None:
    config = run.hydra_path / "config.yaml"
    config.write_text(config.read_text().replace("monitor_mode: min", "monitor_mode: least"))
    error = complaint(capsys, "prune", str(run.path), "--keep", "2")
    assert "ckpt.monitor_mode=least must be one of min, max" in error
    assert len(published(run.checkpoints_path)) == 4


def test_prune_leaves_a_run_that_goes_on_alone(
    capsys: pytest.CaptureFixture[str], run: RunDirectory
) -> None:
    with run.lock():
        complaint(capsys, "prune", str(run.path), "--keep", "2")
    assert len(published(run.checkpoints_path)) == 4


def test_diff(capsys: pytest.CaptureFixture[str], run: RunDirectory) -> None:
    found = run_json(capsys, "diff", str(run.path), "10", "30")
    assert {item["fqn"]: item["max_abs_difference"] for item in found} == {
        "model.count": 20.0,
        "model.flags": 0.0,
        "model.weight": 20.0,
        "optim.weight.exp_avg": 20.0,
    }
    assert main(["ckpt", "diff", str(run.path), "10", "30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["model.count", "largest", "difference", "20"]
    assert lines[-1] == "1 equal, 3 different"


def test_a_run_without_checkpoints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_dir = create_run_directory(tmp_path, "other")
    write_json_atomically(run_dir.plan_path, {})
    assert run_json(capsys, "ls", str(run_dir.path)) == []
    assert run_json(capsys, "verify", str(run_dir.path), status=1) == []
    assert main(["ckpt", "verify", str(run_dir.path)]) == 1
    assert capsys.readouterr().out == "no checkpoints\n"
    assert run_json(capsys, "prune", str(run_dir.path), "--keep", "2")["deleted"] == []
    assert main(["ckpt", "ls", str(run_dir.path)]) == 0
    assert capsys.readouterr().out == "no checkpoints\n"
    assert "has no checkpoint" in complaint(
        capsys, "export", str(run_dir.path), str(tmp_path / "out")
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["ckpt"],
        ["ckpt", "list"],
        ["ckpt", "ls"],
        ["ckpt", "ls", "nowhere"],
        ["ckpt", "prune", "."],
        ["ckpt", "verify", ".", "--step", "x"],
        ["ckpt", "import", "weights.pt"],
    ],
)
def test_bad_arguments_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("hetero ckpt")
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(("keep", "words"), [("1", "1 is too few"), ("x", "'x' is not a whole")])
def test_too_few_to_keep_are_refused(
    capsys: pytest.CaptureFixture[str], run: RunDirectory, keep: str, words: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["ckpt", "prune", str(run.path), "--keep", keep])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_a_checkpoint_of_a_newer_release_is_not_called_damaged(
    capsys: pytest.CaptureFixture[str], run: RunDirectory, tmp_path: Path
) -> None:
    make_newer(checkpoint_path(run.checkpoints_path, PREFIX, 40))
    rows = run_json(capsys, "ls", str(run.path))
    assert [row["is_newer_format"] for row in rows] == [True, False, False, False]
    assert rows[0]["is_verified"] is None
    assert (
        "is of a newer release: its format has version 2, this release reads 1"
        in rows[0]["problem"]
    )
    assert main(["ckpt", "ls", str(run.path)]) == 0
    out = capsys.readouterr().out
    assert "NEWER" in out
    assert "DAMAGED" not in out
    assert main(["ckpt", "verify", str(run.path)]) == 1
    capsys.readouterr()
    assert main(["ckpt", "export", str(run.path), str(tmp_path / "out.safetensors")]) == 0
    told = capsys.readouterr()
    assert "step 40 is not used: " in told.err
    assert "newer release" in told.err
    assert f"{PREFIX}-step-00000030" in told.out


def test_an_export_says_what_it_skips(
    capsys: pytest.CaptureFixture[str], run: RunDirectory, tmp_path: Path
) -> None:
    damage(run, 40)
    assert main(["ckpt", "export", str(run.path), str(tmp_path / "out.safetensors")]) == 0
    told = capsys.readouterr()
    (line,) = told.err.splitlines()
    assert line.startswith("step 40 is not used: ")
    assert "shard-00000.bin: its bytes are not those that were written" in line
    assert f"{PREFIX}-step-00000030" in told.out


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_a_path_of_checkpoints_is_looked_at_without_the_run(
    capsys: pytest.CaptureFixture[str], run: RunDirectory, form: str
) -> None:
    place = form.format(run.checkpoints_path)
    assert [row["step"] for row in run_json(capsys, "ls", place)] == [40, 30, 20, 10]
    assert len(run_json(capsys, "verify", place)) == 4


def test_a_path_of_several_runs_names_them(
    capsys: pytest.CaptureFixture[str], run: RunDirectory, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    for name in ("one", "two"):
        shutil.copytree(run.checkpoints_path, storage / name)
    assert main(["ckpt", "ls", str(storage)]) == 2
    told = capsys.readouterr().err
    assert (
        f"holds the checkpoints of 2 runs: one, two. Give one of them, such as file://{storage}/one"
        in told
    )


def test_a_prune_says_why_nothing_goes(
    capsys: pytest.CaptureFixture[str], run: RunDirectory
) -> None:
    assert main(["ckpt", "prune", str(run.path), "--keep", "4"]) == 0
    assert "keep_latest_k=4: nothing to delete, there are 4" in capsys.readouterr().out
    for step in (10, 20, 30, 40):
        damage(run, step)
    assert main(["ckpt", "prune", str(run.path), "--keep", "2"]) == 0
    out = capsys.readouterr().out
    assert "no checkpoint was found to be as it was written, so none is deleted" in out
    assert len(list(run.checkpoints_path.glob(f"{PREFIX}-step-*"))) == 4


def test_a_prune_says_how_many_cannot_be_read(
    capsys: pytest.CaptureFixture[str], run: RunDirectory
) -> None:
    (checkpoint_path(run.checkpoints_path, PREFIX, 30) / "manifest.json").write_text("{}")
    result = run_json(capsys, "prune", str(run.path), "--keep", "3")
    assert result["reason"] == (
        "keep_latest_k=3: nothing to delete, there are 3; 1 more without a readable manifest stay"
    )
    (checkpoint_path(run.checkpoints_path, PREFIX, 10) / "manifest.json").write_text("{}")
    result = run_json(capsys, "prune", str(run.path), "--keep", "2")
    assert result["reason"].endswith("there are 2; 2 more without a readable manifest stay")
    assert len(published(run.checkpoints_path)) == 4


@pytest.mark.parametrize("form", ["{}", "file://{}", "{}/../checkpoints/"])
def test_prune_of_the_path_in_a_run_is_one_of_the_run(
    capsys: pytest.CaptureFixture[str], run: RunDirectory, form: str
) -> None:
    place = form.format(run.checkpoints_path)
    with run.lock():
        complaint(capsys, "prune", place, "--keep", "2")
    assert len(published(run.checkpoints_path)) == 4
    result = run_json(capsys, "prune", place, "--keep", "2")
    assert result["deleted"] == ["hetero_ckpt-step-00000020"]
    assert "steps [10] best by val_loss" in result["reason"]


def test_prune_without_the_run_needs_consent(
    capsys: pytest.CaptureFixture[str], run: RunDirectory, tmp_path: Path
) -> None:
    place = tmp_path / "storage" / "mine"
    shutil.copytree(run.checkpoints_path, place)
    error = complaint(capsys, "prune", str(place), "--keep", "2")
    assert "says what its run keeps besides the newest" in error
    assert "give the run directory" in error
    assert len(published(place)) == 4
    result = run_json(capsys, "prune", str(place), "--keep", "2", "--newest-only")
    assert [name[-2:] for name in result["deleted"]] == ["10", "20"]
    error = complaint(capsys, "prune", str(run.path), "--keep", "2", "--newest-only")
    assert "configuration of this one says what to keep" in error
    assert len(published(run.checkpoints_path)) == 4


def test_prune_of_a_run_that_has_lost_its_configuration_needs_consent(
    capsys: pytest.CaptureFixture[str], run: RunDirectory
) -> None:
    (run.hydra_path / "config.yaml").unlink()
    complaint(capsys, "prune", str(run.path), "--keep", "2")
    for content in (b"\xff\xfe", b"ckpt: {storage: [1]}", b"ckpt: {storage: '${nope}'}"):
        (run.hydra_path / "config.yaml").write_bytes(content)
        assert main(["ckpt", "ls", str(run.path)]) == 0
        told = capsys.readouterr()
        assert told.err.count(f"{run.hydra_path / 'config.yaml'} cannot be used") == 1
        assert "40" in told.out
        assert main(["ckpt", "prune", str(run.path), "--keep", "2"]) == 2
        assert "cannot be used" in capsys.readouterr().err
        assert len(published(run.checkpoints_path)) == 4
    # Nor does a run whose checkpoints are meant to be elsewhere speak for what lies in it.
    (run.hydra_path / "config.yaml").write_text("ckpt: {storage: /elsewhere}")
    complaint(capsys, "prune", str(run.checkpoints_path), "--keep", "2")
    assert len(published(run.checkpoints_path)) == 4


def test_another_prefix_is_found_from_the_names(
    capsys: pytest.CaptureFixture[str], run: RunDirectory, tmp_path: Path
) -> None:
    place = tmp_path / "storage" / "mine"
    shutil.copytree(run.checkpoints_path, place)
    for path in place.glob("*-step-*"):
        path.rename(place / path.name.replace(PREFIX, "mine"))
    assert [row["step"] for row in run_json(capsys, "ls", str(place))] == [40, 30, 20, 10]
    assert len(run_json(capsys, "verify", str(place))) == 4
    out = tmp_path / "out.safetensors"
    assert run_json(capsys, "export", str(place), str(out))["num_tensors"] == 3
    (place / "mine-step-00000010").rename(place / "other-step-00000010")
    assert main(["ckpt", "ls", str(place)]) == 0
    told = capsys.readouterr()
    assert told.out.count("not read") == 3
    assert "also has checkpoints named other, which are not looked at; only mine is" in told.err
