"""What a run is told to log in with is found nowhere afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, TrainRun
from tests.s3_server import SECRET, S3Server

TINY = (
    *("hardware=a100_v100_mix", "hardware.emulation.dilation=3000", "model.module.model_dim=32"),
    *("model.module.num_layers=2", "data.sequence_length=16", "trainer.max_steps=4"),
    *("hardware.groups.a100.devices_per_node=1", "hardware.groups.v100.devices_per_node=1"),
    *("ckpt=fixed", "ckpt.interval_steps=2"),
)
pytestmark = pytest.mark.timeout(240)


def login(s3: S3Server, url: str) -> tuple[str, ...]:
    return (
        f"ckpt.storage={url}",
        f"ckpt.storage_options={{secret: {SECRET}, key: {s3.options()['key']}}}",
        f"ckpt.storage_options.endpoint_url='{s3.endpoint}'",
    )


def holders(folder: Path, secret: str = SECRET) -> list[str]:
    """Files below `folder` that hold the secret."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in files if secret.encode() in path.read_bytes()]


@pytest.fixture
def _no_login(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the options of the run know how to log in."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ENDPOINT_URL")


@pytest.mark.usefixtures("_no_login")
def test_a_run_leaves_no_login_behind(
    train: Callable[..., TrainRun], s3: S3Server, url: str, tmp_path: Path
) -> None:
    run = train(*TINY, *login(s3, url), timeout_s=150.0)
    assert run.returncode == 0, run.output
    assert f"checkpoints in {url}/run" in run.output
    # And when it is continued with another one.
    more = [text.replace(SECRET, "not-the-secret") for text in login(s3, url)]
    refused = train(*TINY, *more, "trainer.max_steps=6", timeout_s=150.0)
    assert refused.returncode == 2, refused.output
    assert "signature" in refused.output
    assert holders(tmp_path) == []
    assert holders(tmp_path, "not-the-secret") == []
    config = (run.run_dir / ".hydra" / "config.yaml").read_text()
    assert "secret: '***'" in config


@pytest.mark.usefixtures("_no_login")
def test_a_sweep_leaves_no_login_behind(s3: S3Server, url: str, tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "train.py"), "-m", "run_name=sweep", "mode=plan"]
    done = subprocess.run(
        [*command, f"paths.root={tmp_path}", "seed=1,2", *TINY, *login(s3, url)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert (tmp_path / "sweep" / "multirun.yaml").is_file()
    assert holders(tmp_path) == []
    config = (tmp_path / "sweep" / "1" / ".hydra" / "config.yaml").read_text()
    assert f"storage: {url}/sweep" in config
