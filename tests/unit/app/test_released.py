from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from hetero_fw.app.released import warn_of_released
from hetero_fw.app.storage_settings import StoredRun

KEPT = {"keep_latest_k": 2, "keep_every_n_steps": None, "keep_best": 1, "monitor": None}
STORED = StoredRun(checkpoints=tuple(f"hetero_ckpt-step-{step:08}" for step in (6, 12, 18, 24)))


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
    before: dict[str, object], after: dict[str, object], was: str
) -> None:
    old, new = (OmegaConf.create({"ckpt": {**KEPT, **keys}}) for keys in (before, after))
    told = warn_of_released(new, old, STORED)
    assert f"this run had {was}. " in told
    assert "of the steps 6, 12 and" in told


def test_nothing_is_told_where_nothing_goes() -> None:
    old, new = (OmegaConf.create({"ckpt": {**KEPT, "keep_every_n_steps": n}}) for n in (6, 7))
    assert warn_of_released(old, old, STORED) == ""
    assert warn_of_released(new, None, STORED) == ""
    assert warn_of_released(new, old, StoredRun(checkpoints=STORED.checkpoints[2:])) == ""
