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
from hetero_fw.checkpoint.sources import patiently, unreadable
from hetero_fw.checkpoint.storage import StorageError, StoragePath, is_object_store, read_bytes
from hetero_fw.checkpoint.storage_error import kind_of
from hetero_fw.errors import CheckpointError
from hetero_fw.monitoring import write_json_atomically
from hetero_fw.policies import StorageErrorKind, is_quarantined

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


def read_quarantine(root: StoragePath, patience_s: float = 0.0) -> Quarantine:
    """What is known of the checkpoints in `root`; nothing if the file is missing or damaged.

    Without it a bad checkpoint costs two attempts more, so that damage is no reason to stop. A
    storage that does not give the file says nothing about what is in it.

    Args:
        patience_s: how long to try again what the storage does not answer properly.

    Raises:
        StorageError: the storage does not give it. Names the file.
    """
    file = root / QUARANTINE_NAME
    try:
        content = patiently(file, lambda: read_bytes(file), patience_s)
    except (FileNotFoundError, NotADirectoryError):
        return Quarantine()
    except StorageError as error:
        if error.is_absent:
            return Quarantine()
        raise
    except (OSError, CheckpointError) as error:
        is_transient = kind_of(error) is StorageErrorKind.TRANSIENT
        raise StorageError(unreadable(file, error), is_transient=is_transient) from error
    try:
        return Quarantine(incidents=tuple(map(_incident, json.loads(content)["incidents"])))
    except (ValueError, KeyError, TypeError, RecursionError):
        return Quarantine()


def record_incident(root: StoragePath, incident: Incident, patience_s: float = 0.0) -> None:
    """Add to what is known. Called by one rank.

    Args:
        patience_s: as for `read_quarantine`.

    Raises:
        OSError: a local storage refuses.
        CheckpointError: a remote one does, or does not say what is known already.
    """
    incidents = [*read_quarantine(root, patience_s).incidents, incident]
    data = {"incidents": [asdict(item) for item in incidents]}
    if is_object_store(root):  # an object appears whole or not at all
        store = ObjectStore(root)
        text = json.dumps(data).encode()
        patiently(root, lambda: store.put(QUARANTINE_NAME, text), patience_s)
    else:
        write_json_atomically(root / QUARANTINE_NAME, data)


def _incident(row: Mapping[str, Any]) -> Incident:
    return Incident(
        step=int(row["step"]),
        saved_by=int(row["saved_by"]),
        attempt=int(row["attempt"]),
        diverged_step=int(row["diverged_step"]),
    )
