"""The schema's defaults for the keys that a configuration leaves out."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, MutableMapping
from copy import deepcopy
from typing import Any, Union, get_args, get_origin

from omegaconf import DictConfig, open_dict

from hetero_fw.app.schema import Config, keys_of, section_of

Values = MutableMapping[Any, Any]


def complete(config: DictConfig) -> DictConfig:
    """Fill in what `config` leaves out, in place, so that every declared key can be read.

    A name that was given as a number (`run_name=7`) becomes text.
    """
    with open_dict(config):
        _complete(config, Config)
    return config


def completed(values: dict[str, Any]) -> dict[str, Any]:
    """The same for plain containers, as a copy. What has the wrong form is left as it is."""
    copy = deepcopy(values)
    _complete(copy, Config)
    return copy


def defaults_of(section: type) -> dict[str, Any]:
    """The defaults of one section of the schema, required keys left out."""
    values: dict[str, Any] = {}
    for item in dataclasses.fields(section):
        if not item.metadata["rule"].is_filled:
            continue
        if item.default is not dataclasses.MISSING:
            values[item.name] = item.default
        elif dataclasses.is_dataclass(item.default_factory):
            values[item.name] = defaults_of(item.default_factory)
        elif item.default_factory is not dataclasses.MISSING:
            values[item.name] = item.default_factory()
    return values


def _complete(node: Values, section: type) -> None:
    defaults = defaults_of(section)
    for name, key in keys_of(section).items():
        if name not in node and name in defaults:
            node[name] = defaults[name]
        for child, child_section in _subsections(node, name, key.type):
            _complete(child, child_section)
        if _is_text(key.type) and _is_whole_number(node, name):
            node[name] = str(node[name])


def _subsections(node: Values, name: str, annotation: Any) -> Iterator[tuple[Values, type]]:
    value = node.get(name)
    if not isinstance(value, MutableMapping):
        return
    if get_origin(annotation) is not dict:
        section = section_of(annotation)
        if section is not None:
            yield value, section
    elif dataclasses.is_dataclass(get_args(annotation)[1]):
        for entry in value.values():
            if isinstance(entry, MutableMapping):
                yield entry, get_args(annotation)[1]


def _is_whole_number(node: Values, name: str) -> bool:
    value = node.get(name)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(annotation: Any) -> bool:
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return str in (get_args(annotation) if is_union else (annotation,))
