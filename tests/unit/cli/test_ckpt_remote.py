"""`hetero ckpt` where the checkpoints are on a remote storage."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from hetero_fw.app.storage_settings import OPTIONS_VARIABLE
from hetero_fw.checkpoint import ObjectPlace
from hetero_fw.cli import main
from hetero_fw.monitoring import RunDirectory, create_run_directory, write_json_atomically
from tests.unit.checkpoint.object_saves import save_at


@pytest.fixture
def place() -> ObjectPlace:
    """The checkpoints of four steps, those of step 30 twice."""
    place = ObjectPlace(url=f"memory://{uuid.uuid4().hex}/mine", attempt=2)
    place.claim()
    for step in (10, 20, 30, 30, 40):
        save_at(place, step)
    return place


@pytest.fixture
def run(place: ObjectPlace, tmp_path: Path) -> RunDirectory:
    """A run whose configuration says that they lie there."""
    run_dir = create_run_directory(tmp_path, "mine")
    write_json_atomically(run_dir.plan_path, {"ranks": []})
    run_dir.hydra_path.mkdir()
    storage = place.url.removesuffix("/mine")
    text = f"ckpt: {{prefix: hetero_ckpt, storage: '{storage}', storage_options: {{}}}}\n"
    (run_dir.hydra_path / "config.yaml").write_text(text)
    return run_dir


@pytest.fixture(params=["url", "run directory"])
def source(request: pytest.FixtureRequest, place: ObjectPlace, run: RunDirectory) -> str:
    return place.url if request.param == "url" else str(run.path)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    assert main(["ckpt", *arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_ls_and_verify(capsys: pytest.CaptureFixture[str], place: ObjectPlace, source: str) -> None:
    rows = run_json(capsys, "ls", source)
    assert [row["step"] for row in rows] == [40, 30, 30, 20, 10]
    assert {row["tier"] for row in rows} == {"storage"}
    assert rows[0]["path"].startswith(f"{place.url}/hetero_ckpt-step-00000040.2-")
    assert {row["is_verified"] for row in run_json(capsys, "verify", source)} == {True}
    (place.root / Path(rows[0]["path"]).name / "shard-00000.bin").write_bytes(b"short")
    rows = run_json(capsys, "verify", source, status=1)
    assert [row["step"] for row in rows if not row["is_verified"]] == [40]
    assert main(["ckpt", "ls", source]) == 0
    assert capsys.readouterr().out.count("not read") == 5
    assert main(["ckpt", "verify", source, "--step", "31"]) == 2
    assert "there are [10, 20, 30, 40]" in capsys.readouterr().err


def test_export_and_diff(capsys: pytest.CaptureFixture[str], source: str, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    assert run_json(capsys, "export", source, str(out))["num_tensors"] == 3
    assert int(load_file(out)["count"]) == 40
    found = run_json(capsys, "diff", source, "10", "30")
    assert {item["fqn"]: item["likeness"] for item in found}["model.weight"] == "different"


def test_prune(capsys: pytest.CaptureFixture[str], place: ObjectPlace, source: str) -> None:
    consent = []
    if source == place.url:  # says nothing of the run
        assert main(["ckpt", "prune", source, "--keep", "2"]) == 2
        assert "give the run directory" in capsys.readouterr().err
        assert len(run_json(capsys, "ls", source)) == 5
        consent = ["--newest-only"]
    result = run_json(capsys, "prune", source, "--keep", "2", *consent)
    steps = [name.partition(".")[0][-2:] for name in result["deleted"]]
    assert steps == ["10", "20"]
    assert [row["step"] for row in run_json(capsys, "ls", source)] == [40, 30]


def test_a_run_that_goes_on_is_left_alone(
    capsys: pytest.CaptureFixture[str], run: RunDirectory
) -> None:
    with run.lock():
        assert main(["ckpt", "prune", str(run.path), "--keep", "2"]) == 2
    assert len(run_json(capsys, "ls", str(run.path))) == 5


def test_a_login_that_is_not_stored_is_asked_for(
    capsys: pytest.CaptureFixture[str], run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run.hydra_path / "config.yaml"
    path.write_text(path.read_text().replace("{}", "{note: '***'}"))
    monkeypatch.delenv(OPTIONS_VARIABLE, raising=False)
    assert main(["ckpt", "ls", str(run.path)]) == 2
    assert OPTIONS_VARIABLE in capsys.readouterr().err
    monkeypatch.setenv(OPTIONS_VARIABLE, '{"note": "any"}')
    assert len(run_json(capsys, "ls", str(run.path))) == 5


@pytest.mark.usefixtures("_no_gcsfs")
@pytest.mark.parametrize("url", ["s33://bucket/x", "gs://bucket/x"])
def test_a_storage_that_cannot_be_set_up_is_one_line(
    capsys: pytest.CaptureFixture[str], url: str
) -> None:
    assert main(["ckpt", "ls", url]) == 2
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1
    assert "pip install gcsfs" in errors or "no storage that fsspec knows" in errors


def test_a_url_without_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"memory://{uuid.uuid4().hex}/nothing"
    assert run_json(capsys, "ls", url) == []
    assert run_json(capsys, "prune", url, "--keep", "2")["deleted"] == []


def test_another_prefix_is_found_from_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    place = ObjectPlace(url=f"memory://{uuid.uuid4().hex}/mine", attempt=2)
    place.claim()
    path = place.location(save_at(place, 10))
    other = place.root / "mine-step-00000010"
    for name in ("manifest.json", "shard-00000.bin"):
        (other / name).write_bytes((path / name).read_bytes())
        (path / name).unlink()
    assert [row["step"] for row in run_json(capsys, "verify", place.url)] == [10]
