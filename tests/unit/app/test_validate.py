"""Whole configurations: references, defaults, rules across keys."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from hetero_fw.app import validate
from hetero_fw.app.defaults import complete, completed, defaults_of
from hetero_fw.app.plain import UNREADABLE, to_plain
from hetero_fw.app.problem import Problem, problems_text, report_config_error
from hetero_fw.app.rules import check_rules
from hetero_fw.app.schema import Parallel
from hetero_fw.app.validate import require_valid
from hetero_fw.errors import ConfigError

SMALLEST: dict[str, Any] = {
    "hardware": {"name": "local", "probe": True},
    "model": {"module": {"_target_": "recipes.gpt.GPTModule"}},
    "data": {"train": {"_target_": "hetero_fw.data.ByteTextDataset"}, "global_batch_size": 4},
    "trainer": {"max_steps": 3},
}


def config_of(**changes: Any) -> DictConfig:
    config = OmegaConf.create(SMALLEST)
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


def test_the_smallest_configuration_is_valid_and_gets_its_defaults() -> None:
    config = config_of()
    assert validate(config) == []
    assert "ckpt" not in config, "validate changes nothing"
    config = require_valid(config)
    assert config.ckpt.keep_latest_k == 3
    assert config.hardware.emulation.dilation == "auto"
    assert config.data.val is None
    assert "paths" not in config.data, "only text data has it"
    assert validate(config) == []


def test_completing_keeps_what_is_given_and_references() -> None:
    config = config_of(seed=7, data__val_batch_size="${data.global_batch_size}")
    OmegaConf.set_struct(config, True)
    complete(config)
    assert config.seed == 7
    raw = OmegaConf.to_container(config.data, resolve=False)
    assert isinstance(raw, dict)
    assert raw["val_batch_size"] == "${data.global_batch_size}"
    assert OmegaConf.is_struct(config)


def test_completing_survives_wrong_forms() -> None:
    assert completed({"hardware": 3, "ckpt": None})["hardware"] == 3
    assert defaults_of(Parallel)["memory_margin"] == 0.1


def test_references_are_followed_or_reported() -> None:
    config = OmegaConf.create({"a": {"b": "${c}", "d": ["${x.y}", "???"]}, "c": 5})
    values, problems = to_plain(config)
    assert values == {"a": {"b": 5, "d": [UNREADABLE, UNREADABLE]}, "c": 5}
    assert [problem.path for problem in problems] == ["a.d[0]", "a.d[1]"]
    assert "${x.y}" in str(problems[0])


def test_a_wrong_key_does_not_hide_rules_of_others() -> None:
    texts = validate(config_of(seed=-1, resume="must", trainer__typo=1))
    assert [text.split(":")[0] for text in texts] == ["trainer.typo", "seed=-1", "resume=must"]


def test_a_rule_is_not_asked_about_keys_that_are_wrong_already() -> None:
    assert len(validate(config_of(parallel={"batch_split": [3], "kind": "sngle"}))) == 1
    assert len(validate(config_of(hardware=3))) == 1
    assert len(validate(config_of(optim={"scheduler": 3, "optimizer": None}))) == 1


@pytest.mark.parametrize(
    ("path", "key", "does_touch"),
    [
        ("a.b", "a.b", True),
        ("a.b.c", "a.b", True),
        ("a.b[0]", "a.b", True),
        ("a", "a.b", True),
        ("a.bc", "a.b", False),
        ("b", "a.b", False),
    ],
)
def test_which_keys_a_problem_touches(path: str, key: str, does_touch: bool) -> None:
    assert Problem(path, "x").touches(key) is does_touch


@pytest.mark.parametrize("name", ["a", "my run", "2026-11-30_12", "ümlaut", "a.b", "x" * 200])
def test_names_of_runs(name: str) -> None:
    assert list(check_rules(completed({**SMALLEST, "run_name": name}))) == []


@pytest.mark.parametrize("name", ["", " ", ".", "..", "a/b", "a\\b", "a\nb", "x" * 201, "ü" * 101])
def test_no_names_of_runs(name: str) -> None:
    assert len(list(check_rules(completed({**SMALLEST, "run_name": name})))) == 1


def test_problems_are_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert problems_text(["a: b."]) == "hetero_fw: 1 problem in the configuration: a: b."
    assert report_config_error(ConfigError("a: b.", "c: d.")) == 2
    assert capsys.readouterr().err == (
        "hetero_fw: 2 problems in the configuration:\n  1. a: b.\n  2. c: d.\n"
    )
