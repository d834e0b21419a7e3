"""Where the run directory is, also after somebody has moved it under the run."""

from __future__ import annotations

import os
from pathlib import Path

from hetero_fw.monitoring import RunDirectory, read_events, saves_on_line
from hetero_fw.policies import Tier

_DELETED = " (deleted)"  # what Linux adds to the name of an open file that has none any more


class RunPlace:
    """Holds the run directory open, which follows it to another name.

    An attempt cannot end well without it, and another one would begin an empty run in its place.
    """

    def __init__(self, run_dir: RunDirectory) -> None:
        self._path = run_dir.path
        self._descriptor = os.open(run_dir.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def is_gone(self) -> bool:
        """Whether nothing is there; a storage that does not answer is no proof of that."""
        try:
            self._path.stat()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return False

    def tell_loss(self) -> str:
        """What became of the directory that is gone and of what was saved, in words."""
        opened = Path(f"/proc/self/fd/{self._descriptor}")
        try:
            now = str(opened.readlink())
        except OSError:
            now = _DELETED
        gone = f"the run directory {self._path} is gone"
        if now.endswith(_DELETED):
            return f"{gone}, deleted while the run worked in it"
        safe = self._safe(RunDirectory(opened))
        return f"{gone}, it is {now} now; {safe}"

    def _safe(self, run_dir: RunDirectory) -> str:
        events = read_events(run_dir.events_path)
        saves = [event for tier in Tier for event in saves_on_line(events, tier)]
        if not saves:
            return "nothing had been saved"
        newest = max(saves, key=lambda event: event["step"])
        is_inside = Path(newest["path"]).is_relative_to(self._path)
        where = "there" if is_inside else f"in {newest['path']}"
        return (
            f"step {newest['step']} is safe {where}. Move it back, and the same command goes on "
            "from that step"
        )
