"""Every file under conf/ composes, is valid, names public targets and agrees with the schema."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from hetero_fw.app import compose_checked, validate
from hetero_fw.app.defaults import defaults_of
from hetero_fw.app.groups import CONFIG_DIR
from hetero_fw.app.schema import Config, keys_of

GROUPS = {
    *("hardware", "parallel", "ckpt", "recovery", "model", "data", "optim", "trainer"),
    *("callbacks", "logger", "monitor", "launch", "experiment", "debug", "paths"),
}
OPTIONS = sorted((path.parent.name, path.stem) for path in CONFIG_DIR.glob("*/*.yaml"))
# Options that only make sense together with another.
COMPANIONS = {
    "model=digits_mlp": ["data=digits"],
    "data=digits": ["model=digits_mlp"],
    "hardware=gpu_tpu_mix": ["mode=plan"],
}


def compose_option(group: str, option: str) -> DictConfig:
    choice = f"{group}={option}"
    return compose_checked([choice, *COMPANIONS.get(choice, [])])


def targets(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "_target_" in value:
            yield value["_target_"]
        for item in value.values():
            yield from targets(item)


def test_groups_are_the_documented_ones() -> None:
    assert {group for group, _ in OPTIONS} == GROUPS


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_option_composes_and_is_valid(group: str, option: str) -> None:
    config = compose_option(group, option)
    assert validate(config) == []


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_targets_are_public(group: str, option: str) -> None:
    for target in targets(OmegaConf.to_container(compose_option(group, option), resolve=True)):
        module_name, _, name = target.rpartition(".")
        module = importlib.import_module(module_name)
        assert callable(getattr(module, name)), target
        assert name in getattr(module, "__all__", [name]), f"{target} is not exported"
        assert not any(part.startswith("_") for part in target.split(".")), target


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_file_explains_itself(group: str, option: str) -> None:
    lines = (CONFIG_DIR / group / f"{option}.yaml").read_text().splitlines()
    explained = [line for line in lines if line.startswith("#") and "@package" not in line]
    assert explained, "a comment says what the option is for"
    assert max(map(len, lines)) <= 110


@pytest.mark.parametrize("group", sorted(GROUPS & set(keys_of(Config))))
def test_schema_defaults_are_those_of_the_default_option(group: str) -> None:
    section = keys_of(Config)[group].type
    if not isinstance(section, type):
        return
    composed = OmegaConf.to_container(compose_checked([])[group])
    assert isinstance(composed, dict)
    for name, value in defaults_of(section).items():
        is_choice_of_the_option = group in {"model", "data", "optim"} or name == "probe"
        assert is_choice_of_the_option or composed[name] == value, f"{group}.{name}"


def test_numbers_of_the_model_are_written_once() -> None:
    config = compose_checked(["data.sequence_length=128", "model.module.num_layers=2"])
    assert config.model.module.sequence_length == config.data.train.sequence_length == 128
    assert config.model.workload.sequence_length == config.data.val.sequence_length == 128
    assert config.model.workload.num_layers == 2


@pytest.mark.parametrize(
    "key",
    [
        *("run_name", "resume", "mode", "seed", "paths.root"),
        *("trainer.max_steps", "data.global_batch_size", "hardware.emulate"),
        *("hardware.groups.a100.device", "hardware.groups.v100.num_nodes"),
        *("hardware.groups.v100.devices_per_node", "parallel.batch_split"),
        *("parallel.num_microbatches", "parallel.zero_stage", "parallel.precision"),
        *("ckpt.interval_steps", "ckpt.keep_latest_k", "ckpt.prefix", "ckpt.async_mode"),
        *("ckpt.save_optimizer_states", "recovery.heartbeat_interval_s", "recovery.max_restarts"),
    ],
)
def test_keys_that_scripts_rely_on(mix: DictConfig, key: str) -> None:
    parent, _, name = key.rpartition(".")
    assert name in (OmegaConf.select(mix, parent) if parent else mix)


@pytest.fixture(scope="module")
def mix() -> DictConfig:
    return compose_checked(["hardware=a100_v100_mix"])


def test_the_mix_is_two_nodes_of_two(mix: DictConfig) -> None:
    groups = mix.hardware.groups
    assert {name: (g.num_nodes, g.devices_per_node) for name, g in groups.items()} == {
        "a100": (1, 2),
        "v100": (1, 2),
    }


def test_conf_is_found_beside_train_py() -> None:
    assert (Path(CONFIG_DIR).parent / "train.py").is_file()
