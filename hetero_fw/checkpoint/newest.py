"""Find the newest checkpoint, and load it or the one before it if its bytes are damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hetero_fw.checkpoint.filling import Filled
from hetero_fw.checkpoint.found import FoundCheckpoint, OnRejected
from hetero_fw.checkpoint.ranks import Ranks
from hetero_fw.checkpoint.search import Depart, Refuse, Search, TierRoot
from hetero_fw.checkpoint.sources import PATIENCE_S, DamagedCheckpointError


def find_candidates(
    ranks: Ranks,
    roots: Sequence[TierRoot],
    prefix: str,
    *,
    refuse: Refuse,
    on_rejected: OnRejected,
    depart: Depart = lambda manifest: None,
    patience_s: float = PATIENCE_S,
) -> Iterator[FoundCheckpoint]:
    """Every checkpoint whose manifest is sound and whose files are there, the newest first.

    All ranks go through them together; the next one is looked for when it is asked for. Shards
    are not read: `fill_from` does, and tells if the next candidate is needed. A later attempt's
    checkpoint of a step goes before an earlier one's, and so does the later of several versions
    that a remote storage has of a step.

    Args:
        roots: of this rank, nearest first. Those that all ranks see come last, on every rank in
            the same order.
        prefix: first part of the names of checkpoints.
        refuse: asked on rank 0; must not raise.
        on_rejected: called on all ranks, once, for every directory that did not serve, also where
            another one took its place. If its checkpoint may serve all the same, when it was read.
        depart: as `refuse`. What has departed is passed over, which `on_rejected` is told, and
            comes before the first step that is not behind where the departure began.
        patience_s: how long to try again what a storage that all ranks see does not answer
            properly.

    Raises:
        CheckpointError: a storage that all ranks see does not say what it holds, or does not give
            it. Nothing older is taken for that. Names the storage.
        NewerFormatError: the newest that is left is of a newer release; on all ranks.
    """
    search = Search(
        ranks,
        roots,
        prefix,
        refuse=refuse,
        depart=depart,
        on_rejected=on_rejected,
        patience_s=patience_s,
    )
    return search.candidates()


def load_newest(
    candidates: Iterator[FoundCheckpoint], fill: Callable[[FoundCheckpoint], Filled]
) -> tuple[FoundCheckpoint, Filled] | None:
    """Fill from the newest of `candidates` of which every byte is somewhere as it was written.

    Args:
        candidates: of `find_candidates`.
        fill: fills with `fill_from`; is called again, with an older checkpoint, when what it was
            called with before turned out damaged.

    Returns:
        What served; None if there is none.
    """
    for found in candidates:
        try:
            return found, fill(found)
        except DamagedCheckpointError:
            continue  # the ranks agree on that, and it has been told
    return None
