"""An attempt begins in spite of a storage that fails for a moment."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_fw.checkpoint import claim_attempt
from hetero_fw.errors import CheckpointError
from tests.storage_faults import READ_ONLY, Fault, FaultyStorage, faulty_storage

PATIENCE_S = 30.0
OUTAGE_S = 1.0


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[FaultyStorage]:
    with faulty_storage(tmp_path) as mounted:
        yield mounted


@pytest.mark.parametrize(
    "operation",
    ["getattr", "mkdir", "readdir", "rename", "fsyncdir"],
)
def test_an_outage_is_waited_for_wherever_it_begins(storage: FaultyStorage, operation: str) -> None:
    root = storage.root / "checkpoints"
    claim_attempt(root, 0)
    storage.inject(Fault(operations=(operation,), error=errno.EIO))
    timer = threading.Timer(OUTAGE_S, storage.heal)
    timer.start()
    began_s = time.monotonic()
    try:
        own = claim_attempt(root, 1, PATIENCE_S)
    finally:
        timer.join()
    assert time.monotonic() - began_s >= OUTAGE_S
    assert sorted(path.name for path in root.iterdir()) == [".retired-1", ".staging-1"]
    # What repeats itself is this call alone.
    with pytest.raises(CheckpointError, match="attempt 1 has begun before"):
        claim_attempt(root, own.attempt, PATIENCE_S)


def test_a_later_attempt_that_begins_meanwhile_is_seen(storage: FaultyStorage) -> None:
    root = storage.root / "checkpoints"
    root.mkdir()
    storage.inject(Fault(operations=("fsyncdir",), error=errno.EIO))

    def begin_later() -> None:
        storage.heal()
        claim_attempt(root, 2)

    timer = threading.Timer(OUTAGE_S, begin_later)
    timer.start()
    with pytest.raises(CheckpointError, match="attempt 1 is fenced by attempt 2"):
        claim_attempt(root, 1, PATIENCE_S)
    timer.join()


def test_patience_is_bounded_and_not_wasted(storage: FaultyStorage) -> None:
    began_s = time.monotonic()
    storage.inject(Fault(operations=("mkdir",), error=errno.EIO))
    with pytest.raises(CheckpointError, match=r"cannot keep checkpoints in .*Input/output error"):
        claim_attempt(storage.root, 1, 1.5)
    storage.inject(READ_ONLY)
    with pytest.raises(CheckpointError, match=r"cannot keep checkpoints in .*Read-only"):
        claim_attempt(storage.root, 1, PATIENCE_S)
    assert time.monotonic() - began_s < 5.0
