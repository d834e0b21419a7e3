"""One thing that is wrong with a configuration, and how problems are shown."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from hetero_fw.errors import ConfigError
from hetero_fw.monitoring import MASK

CONFIG_ERROR_STATUS = 2
# Its values are not shown, right or wrong.
_HIDDEN = "ckpt.storage_options"


@dataclass(frozen=True)
class Problem:
    """A key and what is wrong with it.

    Attributes:
        path: the dotted key, or the command line argument if it is not about a key.
        rule: what was broken, with the remedy: complete sentences.
        given: the value, to be shown behind the key; None if there is none to show.
    """

    path: str
    rule: str
    given: object = None

    def __str__(self) -> str:
        path = self.path
        given = "" if self.given is None else f"={self.given}"
        if is_hidden(path):
            path, separator, _ = path.partition("=")
            given = f"={MASK}" if given or separator else ""
        return f"{path}{given}: {self.rule}"

    def touches(self, key: str) -> bool:
        """Whether it concerns `key`, something inside it or something that it is inside of."""
        return is_inside(self.path, key) or is_inside(key, self.path)


def is_inside(path: str, key: str) -> bool:
    """Whether `path` is `key` or something inside it."""
    return path == key or path.startswith((f"{key}.", f"{key}["))


def is_hidden(path: str) -> bool:
    """Whether the value of the key or the override `path` must not be shown."""
    return is_inside(path.lstrip("+~").partition("=")[0], _HIDDEN)


def report_config_error(error: ConfigError) -> int:
    """Print every problem of `error` as one message on stderr and return the exit status."""
    print(problems_text(error.problems), file=sys.stderr)
    return CONFIG_ERROR_STATUS


def problems_text(problems: Iterable[str]) -> str:
    """The message that lists `problems`."""
    listed = list(problems)
    if len(listed) == 1:
        return f"hetero_fw: 1 problem in the configuration: {listed[0]}"
    lines = "".join(f"\n  {number}. {text}" for number, text in enumerate(listed, start=1))
    return f"hetero_fw: {len(listed)} problems in the configuration:{lines}"
