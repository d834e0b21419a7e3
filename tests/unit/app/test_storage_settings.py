"""Where checkpoints go by configuration, and how their login stays unseen."""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from hetero_fw.app import compose_checked, run
from hetero_fw.app.places import build_place, checkpoint_root, leave_place, look_at
from hetero_fw.app.run import _with_run_path
from hetero_fw.app.storage_settings import (
    OPTIONS_VARIABLE,
    VEIL_PREFIX,
    StoredRun,
    conceal_file,
    concealed,
    export_options,
    options_for_url,
    storage_options,
)
from hetero_fw.app.veil import veiled
from hetero_fw.checkpoint import (
    AttemptDirectories,
    DirectoryPlace,
    ObjectPlace,
    claim_attempt,
    is_object_store,
)
from hetero_fw.errors import ConfigError
from hetero_fw.monitoring import MASK, RunDirectory, create_run_directory
from tests.unit.checkpoint.examples import PREFIX
from tests.unit.checkpoint.object_saves import save_at

SECRET = "s3cr3t-value"
LITERAL = ("ckpt.storage=s3://bucket/runs", f"ckpt.storage_options.secret={SECRET}")
ONE_DEVICE = ("parallel=single", "hardware.emulate=never")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set and removed again, so that whatever a test leaves there is gone.
    monkeypatch.setenv(OPTIONS_VARIABLE, "{}")
    monkeypatch.delenv(OPTIONS_VARIABLE)


def config(root: Path, *overrides: str) -> DictConfig:
    return compose_checked([f"paths.root={root}", "run_name=run", *overrides])


def stored(cfg: DictConfig, run_dir: RunDirectory) -> DictConfig:
    """As the ranks and `hetero ckpt` read it."""
    export_options(cfg)
    _with_run_path(cfg, run_dir, StoredRun())
    read = OmegaConf.load(run_dir.hydra_path / "config.yaml")
    assert isinstance(read, DictConfig)
    return read


def test_by_default_checkpoints_lie_in_the_run_directory(tmp_path: Path) -> None:
    run_dir = create_run_directory(tmp_path, "run")
    cfg = stored(config(tmp_path), run_dir)
    assert checkpoint_root(cfg, run_dir) == run_dir.checkpoints_path
    place = build_place(cfg, run_dir, 3)
    own = AttemptDirectories(root=run_dir.checkpoints_path, attempt=3)
    assert place == DirectoryPlace(directories=own, attempts=run_dir.attempts_path)
    assert OPTIONS_VARIABLE not in os.environ


def test_a_path_holds_a_directory_for_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = create_run_directory(tmp_path / "outputs", "run")
    cfg = stored(config(tmp_path / "outputs", "ckpt.storage=shared"), run_dir)
    monkeypatch.chdir("/")
    assert checkpoint_root(cfg, run_dir) == tmp_path / "shared" / "run"


def test_the_login_is_not_stored_and_the_ranks_have_it(tmp_path: Path) -> None:
    run_dir = create_run_directory(tmp_path, "run")
    cfg = stored(
        config(
            tmp_path,
            *LITERAL,
            "ckpt.storage_options.client_kwargs={region_name: here-or-there, list: [another-one]}",
            "ckpt.storage_options.retries=12345",
        ),
        run_dir,
    )
    text = (run_dir.hydra_path / "config.yaml").read_text()
    for value in (SECRET, "here-or-there", "another-one", "12345"):
        assert value not in text
    assert cfg.ckpt.storage_options.client_kwargs == {"region_name": MASK, "list": [MASK]}
    place = build_place(cfg, run_dir, 2)
    assert place == ObjectPlace(
        url="s3://bucket/runs/run",
        attempt=2,
        options={
            "secret": SECRET,
            "client_kwargs": {"region_name": "here-or-there", "list": ["another-one"]},
            "retries": 12345,
        },
    )
    assert SECRET not in repr(place)


def test_without_the_environment_it_is_told_how_to_give_the_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = create_run_directory(tmp_path, "run")
    cfg = stored(config(tmp_path, *LITERAL), run_dir)
    monkeypatch.delenv(OPTIONS_VARIABLE)
    with pytest.raises(ConfigError, match=OPTIONS_VARIABLE):
        checkpoint_root(cfg, run_dir)
    monkeypatch.setenv(OPTIONS_VARIABLE, "[1]")
    with pytest.raises(ConfigError, match="is not a JSON object"):
        checkpoint_root(cfg, run_dir)
    monkeypatch.setenv(OPTIONS_VARIABLE, json.dumps({"secret": "given"}))
    assert storage_options(cfg) == options_for_url() == {"secret": "given"}


def test_references_to_the_environment_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", SECRET)
    run_dir = create_run_directory(tmp_path, "run")
    reference = "ckpt.storage_options.secret=${oc.env:MY_SECRET}"
    cfg = stored(config(tmp_path, LITERAL[0], reference), run_dir)
    text = (run_dir.hydra_path / "config.yaml").read_text()
    assert SECRET not in text
    assert "${oc.env:MY_SECRET}" in text
    monkeypatch.delenv(OPTIONS_VARIABLE)
    assert storage_options(cfg) == {"secret": SECRET}
    monkeypatch.delenv("MY_SECRET")
    with pytest.raises(ConfigError, match="MY_SECRET"):
        storage_options(cfg)


def test_a_reference_with_a_default_is_none(tmp_path: Path) -> None:
    text = "ckpt.storage_options.secret='${oc.env:NOT_SET_HERE,the-default}'"
    cfg = config(tmp_path, LITERAL[0], text)
    assert storage_options(cfg) == {"secret": "the-default"}
    assert concealed(cfg) == {"secret": MASK}


def test_a_changed_login_is_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = create_run_directory(tmp_path, "run")
    stored(config(tmp_path, *LITERAL), run_dir)
    other = (LITERAL[0], "ckpt.storage_options.secret=another-value", "seed=7")
    stored(config(tmp_path, *other), run_dir)
    printed = capsys.readouterr().out
    assert "now: seed: 7" in printed
    assert "another-value" not in printed
    assert SECRET not in printed


BAD = [
    ["ckpt.storage=s3://bucket", f"ckpt.storage_options={SECRET}"],
    ["ckpt.storage=s3://bucket", f"ckpt.storage_options.secret={SECRET},other"],
    ["ckpt.storage=s3://bucket", f"ckpt.storage_options.secret={SECRET}("],
    [f"ckpt.storage_options.secret={SECRET}"],
    [f"ckpt.storage=s3://me:{SECRET}@bucket/x"],
    [f"ckpt.storage_optoins.secret={SECRET}"],
]


@pytest.mark.parametrize("overrides", BAD)
def test_a_login_is_not_shown_with_what_is_wrong(overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_checked(overrides)
    assert "ckpt.storage" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_values_on_the_command_line_become_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(9):
        monkeypatch.setenv(f"{VEIL_PREFIX}{number}", "")
    given = [
        "seed=3",
        f"ckpt.storage_options.secret={SECRET}",
        "++ckpt.storage_options.key='with, a comma and \\'quotes\\''",
        "ckpt.storage_options.anon=false",
        "ckpt.storage_options.retries=12345",
        "ckpt.storage_options.token=${oc.env:HOME}",
        f"+ckpt.storage_options.client_kwargs={{a:{SECRET},b:[{SECRET},1.5,null]}}",
        "~ckpt.keep_best",
    ]
    texts = veiled(given)
    assert texts[0] == given[0]
    assert texts[-1] == given[-1]
    for value in (SECRET, "comma", "12345", "1.5"):
        assert value not in " ".join(texts)
    cfg = config(tmp_path, LITERAL[0], *texts[1:-1])
    assert storage_options(cfg) == {
        "secret": SECRET,
        "key": "with, a comma and 'quotes'",
        "anon": False,
        "retries": 12345,
        "token": os.environ["HOME"],
        "client_kwargs": {"a": SECRET, "b": [SECRET, 1.5, None]},
    }
    hidden = concealed(cfg)
    assert hidden["token"] == "${oc.env:HOME}"
    assert {hidden["secret"], hidden["retries"], hidden["client_kwargs"]["a"]} == {MASK}
    with pytest.raises(ConfigError, match="several values"):
        veiled(["ckpt.storage_options.secret=a,b"])


def test_what_hydra_writes_of_a_sweep_is_masked(tmp_path: Path) -> None:
    path = tmp_path / "multirun.yaml"
    path.write_text(f"overrides: ['ckpt.storage_options.secret={SECRET}']\nsecret: {SECRET}\n")
    conceal_file(path, config(tmp_path, *LITERAL))
    assert SECRET not in path.read_text()
    conceal_file(tmp_path / "absent", config(tmp_path, *LITERAL))


def memory(tmp_path: Path, *overrides: str) -> tuple[DictConfig, RunDirectory]:
    url = f"memory://{uuid.uuid4().hex}"
    cfg = config(tmp_path, f"ckpt.storage={url}", *overrides)
    return cfg, create_run_directory(tmp_path, "run")


def test_a_look_at_a_storage(tmp_path: Path) -> None:
    cfg, run_dir = memory(tmp_path)
    root = checkpoint_root(cfg, run_dir)
    assert is_object_store(root)
    seen = look_at(root, PREFIX)
    assert (seen.checkpoints, seen.num_attempts) == ((), 0)
    place = build_place(cfg, run_dir, 4)
    assert isinstance(place, ObjectPlace)
    place.claim()
    for step in (20, 10):
        save_at(place, step)
    seen = look_at(root, PREFIX)
    assert [name.partition(".")[0][-2:] for name in seen.checkpoints] == ["10", "20"]
    assert seen.num_attempts == 5


def test_a_look_at_a_directory(tmp_path: Path) -> None:
    claim_attempt(tmp_path / "kept", 6)
    assert look_at(tmp_path / "kept", PREFIX).num_attempts == 7
    assert look_at(tmp_path / "absent", PREFIX).num_attempts == 0


@pytest.mark.parametrize(
    ("storage", "known", "left"),
    [
        ("shared", (0, 1, 2), []),
        ("shared", (1, 2), [".retired-2"]),  # attempt 0 was started under another paths.root
        ("null", (1, 2), []),  # of a directory of checkpoints that was copied here
    ],
)
def test_who_may_still_run_elsewhere_is_told_of_an_attempt_that_has_ended(
    tmp_path: Path, storage: str, known: tuple[int, ...], left: list[str]
) -> None:
    value = storage if storage == "null" else str(tmp_path / storage)
    run_dir = create_run_directory(tmp_path, "run")
    cfg = stored(config(tmp_path, f"ckpt.storage={value}"), run_dir)
    for attempt in known:
        run_dir.attempt_path(attempt).mkdir(parents=True)
    build_place(cfg, run_dir, 2).claim()
    leave_place(cfg, run_dir, 2)
    root = checkpoint_root(cfg, run_dir)
    assert [path.name for path in root.iterdir()] == left


def test_a_look_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, run_dir = memory(tmp_path)
    root: Any = checkpoint_root(cfg, run_dir)
    monkeypatch.setattr(type(root.fs), "find", lambda *_, **__: time.sleep(5.0))
    with pytest.raises(ConfigError, match=r"no answer within 0 s\. Nothing was started"):
        look_at(root, PREFIX, timeout_s=0.1)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("ckpt.storage=memory://here", "hardware=a100_v100_mix"),
            ("ckpt.storage=memory://here", "4 ranks"),
        ),
        (
            ("ckpt.storage=memory://here", *ONE_DEVICE),
            ("ckpt.storage=memory://here", "ckpt.async_mode=async, or a path"),
        ),
        (("ckpt.storage=gs://bucket/x",), ("pip install gcsfs",)),
        (("ckpt.storage=s3://bucket/x", "resume=must"), ("ckpt.storage: cannot look",)),
    ],
)
@pytest.mark.usefixtures("_no_gcsfs")
def test_refused_before_anything_is_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    scale = ("hardware.emulation.host_flops_per_s=1e10",)
    assert run(config(tmp_path / "outputs", *scale, *overrides)) == 2
    told = capsys.readouterr().err
    assert "1 problem in the configuration" in told
    for word in words:
        assert word in told
    assert not (tmp_path / "outputs").exists()


def test_a_plan_connects_to_nothing(tmp_path: Path) -> None:
    storage = ("ckpt.storage=s3://bucket/x", "resume=must", "mode=plan")
    scale = ("hardware=a100_v100_mix", "hardware.emulation.host_flops_per_s=1e10")
    assert run(config(tmp_path, *scale, *storage)) == 0


def test_resume_is_judged_by_the_storage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    overrides = (f"ckpt.storage={url}", "ckpt.async_mode=async", *ONE_DEVICE)
    assert run(config(tmp_path, *overrides, "resume=must")) == 2
    assert f"no checkpoint to continue from ({url}/run)" in capsys.readouterr().err
    place = ObjectPlace(url=f"{url}/run", attempt=0)
    place.claim()
    save_at(place, 10)
    assert run(config(tmp_path, *overrides, "resume=never")) == 2
    assert f"resume=never, but {url}/run holds 1 checkpoints" in capsys.readouterr().err
