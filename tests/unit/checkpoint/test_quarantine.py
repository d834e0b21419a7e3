from __future__ import annotations

import errno
import uuid
from pathlib import Path

import pytest

from hetero_fw.checkpoint import (
    Incident,
    ObjectPlace,
    StorageError,
    StoragePath,
    checkpoint_path,
    find_restorable,
    list_checkpoints,
    prune,
    read_quarantine,
    record_incident,
)
from hetero_fw.checkpoint.quarantine import QUARANTINE_NAME
from hetero_fw.policies import RetentionRule
from tests.unit.checkpoint.examples import PREFIX, claimed, fill, make_saver, save, weights


def note(root: StoragePath, step: int, *attempts: int, saved_by: int = 1) -> None:
    for attempt in attempts:
        record_incident(
            root,
            Incident(step=step, saved_by=saved_by, attempt=attempt, diverged_step=step + 2),
        )


def test_two_attempts_quarantine_a_checkpoint(tmp_path: Path) -> None:
    note(tmp_path, 10, 4)
    assert read_quarantine(tmp_path).reason(10, 1) is None
    assert read_quarantine(tmp_path).attempts(10, 1) == (4,)
    note(tmp_path, 10, 5)
    reason = read_quarantine(tmp_path).reason(10, 1)
    assert reason is not None
    assert "at step 12 in attempt 4, at step 12 in attempt 5" in reason
    assert read_quarantine(tmp_path).reason(20, 1) is None


def test_the_same_step_saved_again_is_another_checkpoint(tmp_path: Path) -> None:
    note(tmp_path, 10, 4, 5)
    assert read_quarantine(tmp_path).reason(10, 6) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"incidents": [{"step": 1}]}'])
def test_a_damaged_record_is_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / QUARANTINE_NAME).write_text(text)
    assert read_quarantine(tmp_path).incidents == ()
    note(tmp_path, 10, 4)
    assert len(read_quarantine(tmp_path).incidents) == 1


def test_catalog_names_it_and_does_not_restore_it(tmp_path: Path) -> None:
    fill(tmp_path, [10, 20])
    note(tmp_path, 20, 4, 5)
    newest, older = list_checkpoints(tmp_path, PREFIX)
    assert newest.quarantine is not None
    assert older.quarantine is None
    rejected: list[str] = []
    info = find_restorable(tmp_path, PREFIX, lambda path, reason: rejected.append(reason))
    assert info is not None
    assert info.step == 10
    assert "quarantined" in rejected[0]


def test_retention_keeps_the_last_one_that_is_not_quarantined(tmp_path: Path) -> None:
    fill(tmp_path, [10])
    saver = make_saver(tmp_path)
    rule = RetentionRule(keep_latest_k=2, keep_best=0)
    for step in (20, 30, 40, 50):
        assert save(saver, step, weights(step)).ok
        note(tmp_path, step, 4, 5)
        report = prune(tmp_path, PREFIX, rule, into=claimed(tmp_path).retired)
        assert checkpoint_path(tmp_path, PREFIX, 10) not in report.deleted
    assert checkpoint_path(tmp_path, PREFIX, 10).is_dir()
    assert 10 in report.intact.steps
    # Once there are sound ones again, the quarantined ones are as good as gone.
    for step in (60, 70):
        assert save(saver, step, weights(step)).ok
    prune(tmp_path, PREFIX, rule, into=claimed(tmp_path).retired)
    assert [info.step for info in list_checkpoints(tmp_path, PREFIX)] == [70, 60]


def test_a_storage_that_does_not_give_the_record_is_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, [10, 20])
    note(tmp_path, 20, 4, 5)
    record = (tmp_path / QUARANTINE_NAME).read_bytes()
    number_left = [errno.EIO]

    def read(file: Path) -> bytes:
        if number_left:
            raise OSError(number_left.pop(), "not now", str(file))
        return file.read_bytes()

    monkeypatch.setattr("hetero_fw.checkpoint.quarantine.read_bytes", read)
    with pytest.raises(StorageError, match=f"{QUARANTINE_NAME}: cannot be read"):
        list_checkpoints(tmp_path, PREFIX)
    number_left.append(errno.EIO)
    with pytest.raises(StorageError, match=QUARANTINE_NAME):
        note(tmp_path, 20, 6)  # what is known must not be replaced by what is not
    assert (tmp_path / QUARANTINE_NAME).read_bytes() == record
    number_left.append(errno.ESTALE)
    assert read_quarantine(tmp_path, patience_s=30.0).reason(20, 1) is not None


def test_no_record_on_a_remote_storage_is_none() -> None:
    place = ObjectPlace(url=f"memory://{uuid.uuid4().hex}/mine", attempt=0)
    assert read_quarantine(place.root).incidents == ()
    note(place.root, 10, 4)
    assert read_quarantine(place.root).attempts(10, 1) == (4,)
