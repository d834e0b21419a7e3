from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from hetero_fw.app.released import warn_of_released
from hetero_fw.app.storage_settings import StoredRun
from hetero_fw.monitoring import RunDirectory

KEPT = {"keep_latest_k": 2, "keep_every_n_steps": None, "keep_best": 1, "monitor": None}
STORED = StoredRun(checkpoints=tuple(f"hetero_ckpt-step-{step:08}" for step in (6, 12, 18, 24)))


def configuration(**keys: Any) -> DictConfig:
    return OmegaConf.create({"ckpt": {**KEPT, **keys}})


def run_with(path: Path, cfg: DictConfig) -> RunDirectory:
    """A run that was started with `cfg` last."""
    (path / ".hydra").mkdir()
    OmegaConf.save(cfg, path / ".hydra" / "config.yaml")
    return RunDirectory(path)


@pytest.mark.parametrize(
    ("before", "after", "was"),
    [
        ({"keep_every_n_steps": 6}, {}, "ckpt.keep_every_n_steps=6"),
        ({"monitor": "loss"}, {"monitor": "los"}, "ckpt.monitor=loss"),
        ({}, {"keep_every_n_steps": 5}, "ckpt.keep_every_n_steps=null"),
        ({"keep_best": 3, "monitor": "a"}, {}, "ckpt.keep_best=3, ckpt.monitor=a"),
    ],
)
def test_what_another_configuration_has_kept_is_told(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], was: str
) -> None:
    previous = run_with(tmp_path, configuration(**before))
    told = warn_of_released(configuration(**after), previous, STORED)
    assert f"this run had {was}. " in told
    assert "of the steps 6, 12 and" in told


def test_nothing_is_told_where_nothing_goes(tmp_path: Path) -> None:
    old, new = configuration(keep_every_n_steps=6), configuration()
    previous = run_with(tmp_path, old)
    assert warn_of_released(old, previous, STORED) == ""
    assert warn_of_released(new, None, STORED) == ""
    assert warn_of_released(new, previous, StoredRun(checkpoints=STORED.checkpoints[2:])) == ""
