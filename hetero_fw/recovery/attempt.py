"""Files by which the ranks of one attempt and the supervisor know of each other."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hetero_fw.recovery.failure import RankFailure, read_failures
from hetero_fw.recovery.processes import rank_pid


class RankEnd(StrEnum):
    """How a rank ended on purpose."""

    DONE = "done"
    PREEMPTED = "preempted"


@dataclass(frozen=True, kw_only=True)
class NodeRanks:
    """The ranks that one agent starts: `num_ranks` from `first_rank` on."""

    node: str
    first_rank: int
    num_ranks: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_ranks)


@dataclass(frozen=True)
class AttemptFiles:
    """Names of the files in `attempts/<n>/ranks`."""

    folder: Path

    def pid_path(self, rank: int) -> Path:
        return self.folder / f"{rank}.pid"

    def heartbeat_path(self, rank: int) -> Path:
        return self.folder / f"{rank}.heartbeat"

    def end_path(self, rank: int) -> Path:
        return self.folder / f"{rank}.end"

    def announce(self, rank: int) -> None:
        """Called by a rank first of all: now the supervisor can watch it."""
        self.folder.mkdir(exist_ok=True)
        _write(self.pid_path(rank), f"{os.getpid()}\n")

    def finish(self, rank: int, end: RankEnd) -> None:
        """Called by a rank last of all: its exit from here on is no failure."""
        _write(self.end_path(rank), end.value)

    def pid(self, rank: int) -> int | None:
        return rank_pid(self.pid_path(rank))

    def end(self, rank: int) -> RankEnd | None:
        try:
            return RankEnd(self.end_path(rank).read_text())
        except FileNotFoundError:
            return None

    def failures(self) -> list[RankFailure]:
        return read_failures(self.folder)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)
