"""When a simulated cluster fails: drawn from a rate that may step, or read from a real trace."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetero_fw.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class StepFunction:
    """A quantity that is constant between steps: `values[i]` from `starts_s[i]` on.

    Attributes:
        starts_s: ascending, the first one 0.
    """

    starts_s: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.starts_s, self.starts_s[1:], strict=False))
        if not ascending or self.starts_s[:1] != (0.0,) or len(self.starts_s) != len(self.values):
            raise ValueError(
                f"starts_s={self.starts_s} must ascend from 0, one for each of {self.values}."
            )

    @classmethod
    def constant(cls, value: float) -> StepFunction:
        """The same value for ever."""
        return cls(starts_s=(0.0,), values=(value,))

    def at(self, time_s: float) -> float:
        """The value at `time_s`."""
        index = sum(start_s <= time_s for start_s in self.starts_s) - 1
        return self.values[max(0, index)]

    def pieces(self, end_s: float) -> Iterator[tuple[float, float, float]]:
        """(start, end, value) of each piece before `end_s`."""
        ends_s = (*self.starts_s[1:], end_s)
        for start_s, stop_s, value in zip(self.starts_s, ends_s, self.values, strict=True):
            if start_s < end_s:
                yield start_s, min(stop_s, end_s), value


@dataclass(frozen=True, kw_only=True)
class Failure:
    """When the job fails, and the hardware group where that begins (None: unknown)."""

    time_s: float
    group: str | None = None


def draw_failures(
    mtbf_s: StepFunction, end_s: float, seed: int, group: str | None = None
) -> tuple[Failure, ...]:
    """Failures of a group before `end_s`: a Poisson process whose mean gap is `mtbf_s`."""
    generator = np.random.default_rng(seed)
    times_s: list[float] = []
    for start_s, stop_s, mean_s in mtbf_s.pieces(end_s):
        time_s = start_s + generator.exponential(mean_s)
        while time_s < stop_s:
            times_s.append(float(time_s))
            time_s += generator.exponential(mean_s)
    return tuple(Failure(time_s=time_s, group=group) for time_s in times_s)


@dataclass(frozen=True, kw_only=True)
class NodeTrace:
    """How many nodes joined and left a cluster, and when."""

    times_s: tuple[float, ...]
    num_added: tuple[int, ...]
    num_removed: tuple[int, ...]

    @property
    def end_s(self) -> float:
        return self.times_s[-1]

    def failures(self) -> tuple[Failure, ...]:
        """When nodes left; several at one moment are one failure of the job."""
        pairs = zip(self.times_s, self.num_removed, strict=True)
        return tuple(Failure(time_s=time_s) for time_s, num_removed in pairs if num_removed > 0)

    def mtbf_s(self) -> float:
        """Mean time between failures of a job on the whole cluster."""
        return self.end_s / len(self.failures())


_COLUMNS = ("time_s", "num_added", "num_removed")


def parse_node_trace(lines: Sequence[str]) -> NodeTrace:
    """Read a trace: CSV with the columns time_s, num_added, num_removed, in order of time.

    Raises:
        ConfigError: other columns, values that are no numbers, or no row.
    """
    rows = list(csv.DictReader(lines))
    if not rows or tuple(rows[0]) != _COLUMNS:
        raise ConfigError(f"A node trace must have the columns {', '.join(_COLUMNS)} and a row.")
    try:
        return NodeTrace(
            times_s=tuple(float(row["time_s"]) for row in rows),
            num_added=tuple(int(row["num_added"]) for row in rows),
            num_removed=tuple(int(row["num_removed"]) for row in rows),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"A node trace holds numbers only: {error}") from error
