"""Command line overrides: parsed, checked one by one and applied, so that all problems show."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args, get_origin

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from hetero_fw.app.check import join, shown, unknown_key
from hetero_fw.app.problem import Problem, is_hidden
from hetero_fw.app.schema import Config, Options, keys_of, section_of
from hetero_fw.app.targets import accepted_arguments
from hetero_fw.monitoring import MASK


def parse(texts: Iterable[str], loader: ConfigLoader) -> tuple[list[Override], list[Problem]]:
    """Parse `key=value` texts by Hydra's grammar; what cannot be parsed becomes a problem."""
    parser = OverridesParser.create(loader)
    overrides, problems = [], []
    for text in texts:
        if "=" not in text and not text.startswith("~"):
            problems.append(Problem(text, "is not of the form key=value."))
            continue
        try:
            overrides += parser.parse_overrides([text])
        except HydraException as error:
            reason = MASK if is_hidden(text) else str(error).splitlines()[0]
            rule = (
                f"cannot be read ({reason}). Put quotes around special characters: key='\"a b\"'."
            )
            problems.append(Problem(text, rule))
    return overrides, problems


def apply(override: Override, config: DictConfig, groups: Iterable[str]) -> Problem | None:
    """Apply one override of a value to `config` in place.

    A key that the schema declares may be set even if no file mentions it.

    Returns:
        what is wrong with it; `config` is then unchanged.
    """
    key = override.key_or_group
    if "/" in key or override.package is not None:
        return Problem(key, f"unknown config group. Groups: {', '.join(groups)}.")
    problem = _existence_problem(override, config, groups)
    if problem is not None:
        return problem
    try:
        with open_dict(config):
            if override.is_delete():
                parent, _, name = key.rpartition(".")
                del _section(config, parent)[name]
            else:
                OmegaConf.update(config, key, override.value(), merge=True, force_add=True)
    except OmegaConfBaseException as error:
        reason = MASK if is_hidden(key) else str(error).splitlines()[0]
        rule = f"cannot be set: {reason}."
        return Problem(key, rule, given=shown(override.value()))
    return None


def for_hydra(override: Override, config: DictConfig) -> str:
    """The text of an override as Hydra accepts it, given the composed files.

    Hydra refuses to set a key that no file mentions unless it is added by force. A section may
    hold such keys, and is merged either way.
    """
    text = override.input_line or ""
    is_new = isinstance(override.value(), dict) or not _exists(config, override.key_or_group)
    if override.type is OverrideType.CHANGE and is_new:
        return f"++{text}"
    return text


def _existence_problem(
    override: Override, config: DictConfig, groups: Iterable[str]
) -> Problem | None:
    key = override.key_or_group
    exists = _exists(config, key)
    if override.is_add():
        is_value = not isinstance(override.value(), dict | list)
        if exists and is_value and OmegaConf.select(config, key) is not None:
            value = "VALUE" if is_hidden(key) else shown(override.value())
            rule = f"exists already. Drop the +: {key}={value}."
            return Problem(f"+{key}", rule)
        return None
    if exists or override.is_force_add() or is_declared(key, config) or _is_argument(key, config):
        return None
    return _unknown(key, config, groups)


def _is_argument(key: str, config: DictConfig) -> bool:
    """Whether `key` is an argument of a target whose arguments are known, to be checked later."""
    section = _section(config, key.rpartition(".")[0])
    if not isinstance(section, DictConfig) or not isinstance(section.get("_target_"), str):
        return False
    return accepted_arguments(section["_target_"]) is not None


def _unknown(key: str, config: DictConfig, groups: Iterable[str]) -> Problem:
    """The problem of a key that is not there, told about the first part of it that is not."""
    parent = ""
    for name in key.split("."):
        section = _section(config, parent)
        if not isinstance(section, DictConfig):
            return Problem(key, f"unknown key: {parent} is not a section.")
        if name not in section:
            break
        parent = join(parent, name)
    siblings = [*map(str, section), *(() if parent else groups)]
    problem = unknown_key(join(parent, name), dict.fromkeys(siblings))
    if "_target_" in section:
        rule = f"{problem.rule} If {section['_target_']} takes it, add it with +{key}=VALUE."
        return Problem(problem.path, rule)
    if parent == "hardware.groups":
        rule = (
            f"{problem.rule} Choose another hardware=OPTION, or declare the group with "
            f"+{problem.path}.device=DEVICE."
        )
        return Problem(problem.path, rule)
    return problem


def is_declared(key: str, config: DictConfig) -> bool:
    """Whether the schema declares `key`; entries that users name must be in `config`."""
    annotation: Any = Config
    path = ""
    for name in key.split("."):
        path = join(path, name)
        if annotation is Options:
            return True
        if get_origin(annotation) is dict:
            if not _exists(config, path):
                return False
            annotation = get_args(annotation)[1]
            continue
        section = section_of(annotation)
        if section is None or name not in keys_of(section):
            return False
        annotation = keys_of(section)[name].type
    return True


def _exists(config: DictConfig, key: str) -> bool:
    parent, _, name = key.rpartition(".")
    section = _section(config, parent)
    # An index into a list is left to OmegaConf.
    return isinstance(section, ListConfig) or (isinstance(section, DictConfig) and name in section)


def _section(config: DictConfig, path: str) -> Any:
    try:
        return OmegaConf.select(config, path) if path else config
    except OmegaConfBaseException:
        return None
