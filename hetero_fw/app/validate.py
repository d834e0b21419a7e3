"""Everything that is wrong with a composed configuration, found in one pass."""

from __future__ import annotations

from omegaconf import DictConfig

from hetero_fw.app.check import check_section
from hetero_fw.app.defaults import complete, completed
from hetero_fw.app.plain import to_plain
from hetero_fw.app.problem import Problem
from hetero_fw.app.rules import check_rules
from hetero_fw.app.schema import Config
from hetero_fw.errors import ConfigError


def validate(config: DictConfig) -> list[str]:
    """List every problem of a composed configuration; empty if it can be run.

    Looks for unknown and missing keys, wrong types and choices, values out of bounds, references
    that lead nowhere, `_target_`s that do not exist and keys that contradict each other. Imports
    none of the targets.
    """
    return [str(problem) for problem in find_problems(config)]


def find_problems(config: DictConfig) -> list[Problem]:
    """As `validate`, with the key that each problem is about."""
    values, problems = to_plain(config)
    problems += check_section(values, Config)
    problems += check_rules(completed(values), problems)
    return problems


def require_valid(config: DictConfig) -> DictConfig:
    """Return `config` with the defaults of the keys it leaves out.

    Raises:
        ConfigError: lists every problem found.
    """
    ConfigError.collect(validate(config))
    return complete(config)
