"""Compose a configuration from overrides and report everything that is wrong with it at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import yaml
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from hetero_fw.app.defaults import complete
from hetero_fw.app.groups import GLOBAL_GROUPS, ConfigLibrary, ConfigSource
from hetero_fw.app.overrides import apply, for_hydra, parse
from hetero_fw.app.problem import Problem, is_hidden, is_inside
from hetero_fw.app.validate import find_problems
from hetero_fw.errors import ConfigError

# Values of one sweep that are looked at before the first job; each job is checked again anyway.
_MAX_SWEEP_VALUES = 50


@dataclass(frozen=True, kw_only=True)
class Composed:
    """What a command line composes to.

    Attributes:
        config: without the `hydra` section; of the first job if there are several.
        overrides: the overrides as Hydra itself accepts them.
        is_multirun: whether they describe several jobs.
        composition_problems: what keeps Hydra from composing: names that do not exist.
        value_problems: what is wrong with the values of any job.
    """

    config: DictConfig
    overrides: tuple[str, ...]
    is_multirun: bool
    composition_problems: tuple[Problem, ...]
    value_problems: tuple[Problem, ...]


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One job: `files` is what the chosen files compose to, `config` has the values set as well."""

    files: DictConfig
    config: DictConfig
    is_multirun: bool
    composition_problems: list[Problem]
    value_problems: list[Problem]


def compose_checked(overrides: Sequence[str], source: ConfigSource | None = None) -> DictConfig:
    """Compose, validate and complete the configuration of one run.

    Raises:
        ConfigError: lists every problem found.
    """
    composed = compose(overrides, source or ConfigSource())
    problems = (*composed.composition_problems, *composed.value_problems)
    ConfigError.collect(str(problem) for problem in problems)
    return complete(composed.config)


def compose(texts: Sequence[str], source: ConfigSource, *, is_multirun: bool = False) -> Composed:
    """Compose the overrides `texts` and look for problems in every job they describe.

    Raises:
        ConfigError: nothing can be composed at all.
    """
    library = ConfigLibrary(source, texts)
    parsed, problems = parse(texts, library.loader)
    variants = list(_variants(parsed, library))
    first = _compose_job(library, variants[0], problems, is_multirun=is_multirun)
    jobs = [first]
    is_multirun = is_multirun or first.is_multirun
    if is_multirun:
        jobs += [_compose_job(library, job, problems, is_multirun=True) for job in variants[1:]]
    else:
        problems += [_needs_multirun(o) for o in parsed if o.is_sweep_override()]
    return Composed(
        config=first.config,
        overrides=tuple(
            for_hydra(o, first.files) if _is_value(o, library) else o.input_line or ""
            for o in parsed
        ),
        is_multirun=is_multirun,
        composition_problems=_distinct(
            problems + [p for job in jobs for p in job.composition_problems]
        ),
        value_problems=_distinct(p for job in jobs for p in job.value_problems),
    )


def _compose_job(
    library: ConfigLibrary,
    overrides: Sequence[Override],
    known: Sequence[Problem],
    *,
    is_multirun: bool,
) -> _Job:
    choices, problems, unsure = _choose(library, overrides)
    try:
        files = library.compose(choices, is_multirun=is_multirun)
    except (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
        # Without a configuration to look at nothing more can be found.
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else ""
        text = " ".join(f"{error} {cause}".split())
        raise ConfigError(*map(str, [*known, *problems]), f"configuration: {text}") from None
    with open_dict(files):
        hydra = files.pop("hydra")
    config = files.copy()
    groups = library.groups
    values = [override for override in overrides if _is_value(override, library)]
    applied = [apply(override, config, groups) for override in values]
    problems += [problem for problem in applied if problem is not None]
    return _Job(
        files=files,
        config=config,
        is_multirun=hydra.mode == RunMode.MULTIRUN,
        composition_problems=_sure(problems, unsure),
        value_problems=_sure(find_problems(config), unsure),
    )


def _choose(
    library: ConfigLibrary, overrides: Sequence[Override]
) -> tuple[list[str], list[Problem], list[str]]:
    """Split off what chooses options.

    Returns:
        overrides to compose with, misspelt options replaced by what was probably meant; the
        problems; the groups for which nothing comes near, so that what is in them is unknown.
    """
    choices: list[str] = []
    problems: list[Problem] = []
    unsure: list[str] = []
    for override in overrides:
        if _is_value(override, library):
            continue
        text: str | None = override.input_line
        found = list(library.check_choice(override)) if library.is_choice(override) else []
        if found:
            text = library.nearest_choice(override)
            problems += found
        if text is None:
            unsure.append(override.key_or_group)
        else:
            choices.append(text)
    return choices, problems, unsure


def _is_value(override: Override, library: ConfigLibrary) -> bool:
    return not library.is_choice(override) and not override.is_hydra_override()


def _sure(problems: Iterable[Problem], unsure: Sequence[str]) -> list[Problem]:
    """Leave out the problems that an option which is not known may cause or cure."""
    is_all_open = any(group in GLOBAL_GROUPS for group in unsure)
    return [
        problem
        for problem in problems
        if problem.path in unsure
        or not (is_all_open or any(is_inside(problem.path, group) for group in unsure))
    ]


def _variants(overrides: Sequence[Override], library: ConfigLibrary) -> Iterator[list[Override]]:
    """Jobs that hold every value of every sweep: the first job, then one change to it at a time."""
    values = [_values(override, library) for override in overrides]
    first = [choices[0] for choices in values]
    yield first
    for index, choices in enumerate(values):
        for value in choices[1:]:
            yield [*first[:index], value, *first[index + 1 :]]


def _values(override: Override, library: ConfigLibrary) -> list[Override]:
    """The overrides that a sweep stands for; the override itself if it is none."""
    if not override.is_sweep_override():
        return [override]
    if override.is_discrete_sweep():
        texts = list(override.sweep_string_iterator())
    else:
        interval = cast(IntervalSweep, override.value())
        texts = [str(interval.start), str(interval.end)]
    if len(texts) > _MAX_SWEEP_VALUES:
        texts = texts[: _MAX_SWEEP_VALUES // 2] + texts[-_MAX_SWEEP_VALUES // 2 :]
    key = override.get_key_element()
    parsed, _ = parse([f"{key}={text}" for text in texts], library.loader)
    return parsed


def _needs_multirun(override: Override) -> Problem:
    key, value = override.key_or_group, override.get_value_string()
    if is_hidden(key):
        return Problem(key, "one value holds a comma. Put quotes around it: key='\"a,b\"'.")
    rule = f"several values need -m (one run for each). Write a list as {key}=[{value}]."
    return Problem(key, rule, given=value)


def _distinct(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    return tuple({str(problem): problem for problem in problems}.values())
