"""Checkpoints that load and then diverge: a small file beside them says which, and since when.

It lies with the checkpoints, not in the event log, because whoever decides about a checkpoint looks
there: the next attempt, retention and the tools, also where checkpoints are not kept in the run
directory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hetero_fw.checkpoint.object_store import ObjectStore
from hetero_fw.checkpoint.storage import StoragePath, is_object_store, read_bytes
from hetero_fw.monitoring import write_json_atomically
from hetero_fw.policies import is_quarantined

QUARANTINE_NAME = "quarantine.json"


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A training that diverged soon after it was restored.

    Attributes:
        step: of the checkpoint.
        saved_by: attempt that saved it; the same step can be saved again later.
        attempt: the one that diverged.
        diverged_step: where its loss was no longer finite.
    """

    step: int
    saved_by: int
    attempt: int
    diverged_step: int


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """All incidents of the checkpoints in one directory."""

    incidents: tuple[Incident, ...] = ()

    def attempts(self, step: int, saved_by: int) -> tuple[int, ...]:
        """Attempts that diverged after they restored this checkpoint."""
        return tuple(incident.attempt for incident in self._of(step, saved_by))

    def reason(self, step: int, saved_by: int) -> str | None:
        """Why this checkpoint is not to be used; None if it may be."""
        incidents = self._of(step, saved_by)
        if not is_quarantined({incident.attempt for incident in incidents}):
            return None
        seen = ", ".join(
            f"at step {incident.diverged_step} in attempt {incident.attempt}"
            for incident in incidents
        )
        return f"it is quarantined: after restoring it the loss was not finite {seen}"

    def _of(self, step: int, saved_by: int) -> list[Incident]:
        return [i for i in self.incidents if (i.step, i.saved_by) == (step, saved_by)]


def read_quarantine(root: StoragePath) -> Quarantine:
    """What is known of the checkpoints in `root`; nothing if the file is missing or damaged.

    Without it a bad checkpoint costs two attempts more, so that it is no reason to stop.
    """
    try:
        rows = json.loads(read_bytes(root / QUARANTINE_NAME))["incidents"]
        return Quarantine(incidents=tuple(map(_incident, rows)))
    except Exception:  # noqa: BLE001  # stores raise what they like
        return Quarantine()


def record_incident(root: StoragePath, incident: Incident) -> None:
    """Add to what is known. Called by one rank.

    Raises:
        OSError: a local storage refuses.
        StorageError: a remote one does.
    """
    incidents = [*read_quarantine(root).incidents, incident]
    data = {"incidents": [asdict(item) for item in incidents]}
    if is_object_store(root):  # an object appears whole or not at all
        ObjectStore(root).put(QUARANTINE_NAME, json.dumps(data).encode())
    else:
        write_json_atomically(root / QUARANTINE_NAME, data)


def _incident(row: Mapping[str, Any]) -> Incident:
    return Incident(
        step=int(row["step"]),
        saved_by=int(row["saved_by"]),
        attempt=int(row["attempt"]),
        diverged_step=int(row["diverged_step"]),
    )
