"""The directories in which the files of one checkpoint lie, and what is known of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_fw.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Source:
    """A directory of a checkpoint, as one rank knows it.

    Attributes:
        tier: name of the tier, for people.
        directory: a path, or an object that is used like one; never converted to one.
        node: whose directory it is; None where all ranks see the same files, so that rank 0 can
            look for all of them.
        distance: of the tier; smaller is nearer.
    """

    tier: str
    directory: Any
    node: str | None
    distance: tuple[int, int]

    @property
    def is_shared(self) -> bool:
        return self.node is None


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A directory that did not serve, and why; the reason names the file.

    Attributes:
        step: None if the directory is not that of a step.
    """

    step: int | None
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """One rank's source, as the other ranks need to know it.

    Attributes:
        files: names of those that are there with their size.
        problems: what is wrong with others, by name; those that are just not there count where
            the source is shared, because then it should hold all of them.
    """

    tier: str
    directory: str
    node: str | None
    distance: tuple[int, int]
    files: frozenset[str]
    problems: Mapping[str, str]


def look_at(source: Source, sizes: Mapping[str, int]) -> SourceFacts:
    """Which of the files are there with their size; none is read."""
    files, problems = [], {}
    for name, size in sizes.items():
        path = source.directory / name
        try:
            found = path.stat().st_size
        except Exception as error:  # noqa: BLE001  # stores raise what they like
            if source.is_shared or not isinstance(error, FileNotFoundError):
                problems[name] = unreadable(path, error)
            continue
        if found == size:
            files.append(name)
        else:
            problems[name] = f"{path}: has {found} bytes, {size} were written"
    return SourceFacts(
        tier=source.tier,
        directory=str(source.directory),
        node=source.node,
        distance=source.distance,
        files=frozenset(files),
        problems=problems,
    )


def unreadable(path: Any, error: Exception) -> str:
    """That a file cannot be read, and why."""
    reason = error.strerror if isinstance(error, OSError) else None
    return f"{path}: cannot be read ({reason or str(error) or repr(error)})"


def rejected(rejections: Sequence[Rejection]) -> CheckpointError:
    """The error of a checkpoint that nothing else can stand in for."""
    return CheckpointError("; ".join(dict.fromkeys(item.reason for item in rejections)))
