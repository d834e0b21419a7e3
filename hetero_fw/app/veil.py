"""Logins on the command line, taken out of sight before Hydra prints and stores what it was given.

Each value of `ckpt.storage_options` becomes a reference to a variable of this process.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString

from hetero_fw.app.problem import is_hidden
from hetero_fw.app.storage_settings import VEIL_PREFIX
from hetero_fw.errors import ConfigError


def veiled(texts: Iterable[str]) -> list[str]:
    """The overrides `texts`, which parse, with references for values that are not to be shown.

    Raises:
        ConfigError: such a value is to be swept over: each run is told by its overrides.
    """
    names = (f"{VEIL_PREFIX}{number}" for number in itertools.count())
    return [_veiled(text, names) if is_hidden(text) else text for text in texts]


def _veiled(text: str, names: Iterator[str]) -> str:
    override = OverridesParser.create().parse_override(text)
    if override.is_delete():
        return text
    if override.is_sweep_override():
        raise ConfigError(
            f"{override.key_or_group}: several values, one for each run, would be shown with the "
            "runs. Give one value."
        )
    key, separator, _ = text.partition("=")
    return f"{key}{separator}{_render(override.value(), names)}"


def _render(value: Any, names: Iterator[str]) -> str:
    """`value` in Hydra's grammar."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_render(item, names)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_render(item, names) for item in value) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = value.text if isinstance(value, QuotedString) else str(value)
    if "${" in text:
        return f"'{text}'"
    name = next(names)
    os.environ[name] = text
    reference = f"${{oc.env:{name}}}"
    is_number = isinstance(value, int | float)
    return f"'${{oc.decode:{reference}}}'" if is_number else f"'{reference}'"
