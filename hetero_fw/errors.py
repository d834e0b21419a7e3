"""Errors that a user can act on. Each message names what was given, the rule and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` was probably meant to be, None if nothing is close."""
    folded, by_folded = word.casefold(), {choice.casefold(): choice for choice in choices}
    # A beginning is a stronger sign than a likeness: `a100` means `a100-80gb` rather than `a10`.
    begun = [choice for choice in by_folded if choice.startswith(folded) and len(folded) > 1]
    close = begun or difflib.get_close_matches(folded, by_folded, n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """The suggestion " Did you mean 'x'?" to append to a message, or "" if nothing is close."""
    choice = closest(word, choices)
    return f" Did you mean {choice!r}?" if choice is not None else ""


class HeteroError(Exception):
    """Base of every error that hetero_fw raises on purpose."""


class ConfigError(HeteroError, ValueError):
    """The configuration cannot be run. Raised before any process starts; exit status 2.

    Args:
        problems: one complete sentence or more for each problem found, all of them at once.
    """

    def __init__(self, *problems: str) -> None:
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__("\n".join(problems))

    @classmethod
    def collect(cls, problems: Iterable[str]) -> None:
        """Raise one ConfigError that lists every problem; return if there is none."""
        found = tuple(problems)
        if found:
            raise cls(*found)


class InfeasiblePlanError(ConfigError):
    """No plan fits the cluster. Names the tightest device and by how much it falls short."""


class CheckpointError(HeteroError):
    """A checkpoint cannot be written, verified or read. Names the file and the reason."""


class RecoveryError(HeteroError):
    """A run cannot be continued: restarts are used up or the failure is not transient."""
