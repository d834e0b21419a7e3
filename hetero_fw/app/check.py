"""Compare plain containers with the schema: unknown and missing keys, types, choices, bounds."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from hetero_fw.app.plain import UNREADABLE
from hetero_fw.app.problem import Problem
from hetero_fw.app.schema import (
    Component,
    Config,
    Key,
    Options,
    Rule,
    entry_type,
    keys_of,
    section_of,
)
from hetero_fw.app.targets import argument_problems, target_problem
from hetero_fw.errors import closest, did_you_mean


def check_section(values: Mapping[str, Any], section: type, path: str = "") -> Iterator[Problem]:
    """Yield one problem for each key of `values` that breaks the schema of `section`."""
    declared = keys_of(section)
    entry = entry_type(section)
    for name, value in values.items():
        if name not in declared and entry is not None:
            item = Key(name=name, type=entry, rule=Rule(help="an entry"), is_required=False)
            yield from _check_value(value, item, join(path, name))
        elif name not in declared:
            yield unknown_key(join(path, name), declared)
        else:
            yield from _check_value(value, declared[name], join(path, name))
    for name, key in declared.items():
        if key.is_required and name not in values:
            yield Problem(join(path, name), f"missing ({key.rule.help}).")


def unknown_key(path: str, siblings: Iterable[str]) -> Problem:
    """The problem of a key that does not exist, with what was probably meant."""
    parent, _, name = path.rpartition(".")
    near = closest(name, siblings)
    meant = join(parent, near) if near is not None else _same_name_elsewhere(name)
    hint = f" Did you mean {meant!r}?" if meant is not None else ""
    place = f"in {parent}" if parent else "at the top"
    return Problem(path, f"unknown key.{hint} Keys {place}: {', '.join(siblings) or 'none'}.")


def _same_name_elsewhere(name: str) -> str | None:
    return next((path for path in all_paths() if path.rpartition(".")[2] == name), None)


def join(path: str, name: str) -> str:
    """The dotted path of `name` inside `path`."""
    return f"{path}.{name}" if path else name


@cache
def all_paths(section: type = Config, path: str = "") -> tuple[str, ...]:
    """Every declared key as a dotted path."""
    paths: list[str] = []
    for key in keys_of(section).values():
        paths.append(join(path, key.name))
        inner = None if get_origin(key.type) is dict else section_of(key.type)
        if inner is not None:
            paths.extend(all_paths(inner, paths[-1]))
    return tuple(paths)


def _check_value(value: Any, key: Key, path: str) -> Iterator[Problem]:
    if value is UNREADABLE:
        return
    options = _alternatives(key.type)
    if isinstance(value, dict):
        yield from _check_mapping(value, options, key, path)
    elif not any(_fits(value, option, key.rule) for option in options):
        yield _mismatch(value, options, key.rule, path)


def _check_mapping(
    value: dict[str, Any], options: list[Any], key: Key, path: str
) -> Iterator[Problem]:
    for option in options:
        if option is Component:
            yield from _check_component(value, path)
            return
        if option is Options:
            return
        if is_dataclass(option):
            yield from check_section(value, option, path)  # type: ignore[arg-type]
            return
        if get_origin(option) is dict:
            item = Key(name="", type=get_args(option)[1], rule=key.rule, is_required=False)
            for name, entry in value.items():
                yield from _check_value(entry, item, join(path, name))
            return
    yield Problem(path, f"is a section, must be {_describe(options, key.rule)}.")


def _check_component(value: dict[str, Any], path: str) -> Iterator[Problem]:
    if "_target_" not in value:
        near = did_you_mean("_target_", value)
        yield Problem(path, f"needs a _target_, the dotted path of a class or function.{near}")
    yield from _check_targets(value, path)


def _check_targets(value: Any, path: str) -> Iterator[Problem]:
    """Look at the `_target_`s at any depth of a free-form subtree."""
    if isinstance(value, dict):
        if value.get("_target_") not in (None, UNREADABLE):
            yield from _check_target(value, path)
        for name, entry in value.items():
            yield from _check_targets(entry, join(path, name))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _check_targets(entry, f"{path}[{index}]")


def _check_target(value: dict[str, Any], path: str) -> Iterator[Problem]:
    target = value["_target_"]
    problem = target_problem(target)
    if problem is not None:
        yield Problem(join(path, "_target_"), problem, given=target)
        return
    # What Hydra's instantiate keeps for itself (_partial_, _convert_, ...) is no argument.
    arguments = [name for name in value if not (name.startswith("_") and name.endswith("_"))]
    for name, text in argument_problems(target, arguments).items():
        yield Problem(join(path, name), text)


def _alternatives(annotation: Any) -> list[Any]:
    """The members of a union, with the choices of all its literals gathered in one."""
    origin = get_origin(annotation)
    members = list(get_args(annotation)) if origin in (Union, types.UnionType) else [annotation]
    choices = [c for m in members if get_origin(m) is Literal for c in get_args(m)]
    others = [m for m in members if get_origin(m) is not Literal]
    return ([Literal[tuple(choices)]] if choices else []) + others


def _fits(value: Any, option: Any, rule: Rule) -> bool:
    if option is type(None):
        return value is None
    if get_origin(option) is Literal:
        # `True == 1`, so the type counts too
        return any(value == choice and type(value) is type(choice) for choice in get_args(option))
    if get_origin(option) is list:
        item = get_args(option)[0]
        return isinstance(value, list) and all(
            entry is UNREADABLE or _fits(entry, item, rule) for entry in value
        )
    if option is bool:
        return isinstance(value, bool)
    if option in (int, float):
        numbers = int if option is int else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool) and _within(value, rule)
    # A name that looks like a number, such as run_name=7, arrives as one.
    is_text = isinstance(value, str | int) and not isinstance(value, bool)
    return option is str and is_text and (rule.catalog is None or str(value) in rule.catalog)


def _within(value: float, rule: Rule) -> bool:
    return (
        (rule.at_least is None or value >= rule.at_least)
        and (rule.above is None or value > rule.above)
        and (rule.at_most is None or value <= rule.at_most)
        and (rule.below is None or value < rule.below)
    )


def _mismatch(value: Any, options: list[Any], rule: Rule, path: str) -> Problem:
    choices = [str(c) for o in options if get_origin(o) is Literal for c in get_args(o)]
    near = did_you_mean(str(value), [*choices, *(rule.catalog or ())])
    need = f"must be {_describe(options, rule)} ({rule.help}).{near}"
    return Problem(path, need, given=shown(value))


def shown(value: Any) -> str:
    """A value as it would be written on the command line."""
    if isinstance(value, list):
        return "[" + ",".join(map(shown, value)) + "]"
    words = {"None": "null", "True": "true", "False": "false"}
    return words.get(str(value), str(value))


def _describe(options: list[Any], rule: Rule) -> str:
    words = [_describe_one(option, rule) for option in options]
    return ", ".join(words[:-1]) + " or " + words[-1] if len(words) > 1 else words[0]


def _describe_one(option: Any, rule: Rule) -> str:
    if get_origin(option) is Literal:
        choices = [str(choice) for choice in get_args(option)]
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if get_origin(option) is list:
        return "a list [...], each " + _describe_one(get_args(option)[0], rule)
    if option is Component:
        return "a section with a _target_"
    if is_dataclass(option):
        return "a section with the keys " + ", ".join(keys_of(option))  # type: ignore[arg-type]
    if option is Options or get_origin(option) is dict:
        return "a section"
    if option is str and rule.catalog is not None:
        return "one of " + ", ".join(rule.catalog)
    plain = {type(None): "null", bool: "true or false", str: "text"}
    return plain[option] if option in plain else _describe_number(option, rule)


def _describe_number(option: Any, rule: Rule) -> str:
    signs = {">=": rule.at_least, ">": rule.above, "<=": rule.at_most, "<": rule.below}
    bounds = " and ".join(f"{sign} {bound}" for sign, bound in signs.items() if bound is not None)
    noun = "a whole number" if option is int else "a number"
    return f"{noun} {bounds}".rstrip()
