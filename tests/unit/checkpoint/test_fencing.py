from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hetero_fw.checkpoint import (
    AttemptDirectories,
    claim_attempt,
    dead_directory,
    fenced_by,
    leave_attempt,
)
from hetero_fw.checkpoint.fencing import remake
from hetero_fw.errors import CheckpointError
from tests.unit.checkpoint.examples import make_saver, published, save, weights

NAME = "hetero_ckpt-step-00000005"


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def leave(directory: Path, name: str, content: str = "old") -> None:
    (directory / name).mkdir(parents=True)
    (directory / name / "file").write_text(content)


def test_an_attempt_gets_two_directories(tmp_path: Path) -> None:
    own = claim_attempt(tmp_path / "checkpoints", 3)
    assert names(own.root) == [".retired-3", ".staging-3"]
    assert fenced_by(own) is None


def test_what_earlier_attempts_left_is_cleared(tmp_path: Path) -> None:
    for attempt in (0, 7):
        earlier = claim_attempt(tmp_path, attempt)
        leave(earlier.staging, f"{NAME}.ab")
        leave(earlier.retired, f"{NAME}.pruned-cd")
    leave(tmp_path, "hetero_ckpt-step-00000001")
    leave(tmp_path, ".cache")
    own = claim_attempt(tmp_path, 12)
    assert names(tmp_path) == [
        ".cache",
        ".retired-12",
        ".staging-12",
        "hetero_ckpt-step-00000001",
    ]
    assert list(own.staging.iterdir()) == list(own.retired.iterdir()) == []


def test_an_interrupted_replacement_is_put_back(tmp_path: Path) -> None:
    leave(claim_attempt(tmp_path, 0).retired, f"{NAME}.replaced-ab")
    claim_attempt(tmp_path, 1)
    assert (tmp_path / NAME / "file").read_text() == "old"


def test_a_complete_replacement_is_not_undone(tmp_path: Path) -> None:
    leave(claim_attempt(tmp_path, 0).retired, f"{NAME}.replaced-ab")
    leave(tmp_path, NAME, "new")
    claim_attempt(tmp_path, 1)
    assert (tmp_path / NAME / "file").read_text() == "new"


def test_an_interrupted_clearing_is_completed(tmp_path: Path) -> None:
    leave(tmp_path / ".dead-retired-0-1234", f"{NAME}.replaced-ab")
    leave(dead_directory(tmp_path), f"{NAME}.pruned-cd")
    claim_attempt(tmp_path, 1)
    assert names(tmp_path) == [".retired-1", ".staging-1", NAME]


def test_an_attempt_that_begins_late_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    later = claim_attempt(tmp_path, 4)
    leave(later.staging, f"{NAME}.ab")
    with pytest.raises(CheckpointError, match="attempt 3 is fenced by attempt 4"):
        claim_attempt(tmp_path, 3)
    assert names(tmp_path) == [".retired-4", ".staging-4"]
    assert (later.staging / f"{NAME}.ab" / "file").exists()


def test_a_number_is_used_once(tmp_path: Path) -> None:
    claim_attempt(tmp_path, 3)
    with pytest.raises(CheckpointError, match="attempt 3 has begun before"):
        claim_attempt(tmp_path, 3)


def test_a_root_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "checkpoints"):
        with pytest.raises(CheckpointError, match="cannot keep checkpoints in"):
            claim_attempt(root, 0)


def test_every_save_of_a_stale_attempt_fails_and_says_by_whom(tmp_path: Path) -> None:
    stale = make_saver(tmp_path, attempt=1)
    assert save(stale, 1, weights(1)).ok
    newer = make_saver(tmp_path, attempt=2)
    assert save(newer, 2, weights(2)).ok
    before = sorted(tmp_path.rglob("*"))
    for step in (2, 3):  # one that the newer attempt has published, and one that it has not
        outcome = save(stale, step, weights(99))
        assert not outcome.ok
        assert outcome.reason == "fenced by attempt 2"
    assert sorted(tmp_path.rglob("*")) == before
    assert len(published(tmp_path)) == 2


def test_who_fenced_is_unknown_where_nothing_can_be_read(tmp_path: Path) -> None:
    assert fenced_by(AttemptDirectories(root=tmp_path / "absent", attempt=1)) is None


def attempts(tmp_path: Path, *numbers: int) -> Path:
    for number in numbers:
        (tmp_path / "attempts" / str(number)).mkdir(parents=True)
    return tmp_path / "attempts"


def test_a_directory_that_was_moved_away_is_made_again(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    own = claim_attempt(root, 2)
    root.rename(tmp_path / "moved")
    assert remake(own, attempts(tmp_path, 0, 1, 2))
    assert own.staging.is_dir()
    assert own.retired.is_dir()
    # It is this attempt's as ever: a later one fences it.
    claim_attempt(root, 3)
    assert not own.staging.exists()
    assert fenced_by(own) == 3


def test_it_is_not_made_again_by_an_attempt_that_is_stale(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    own = claim_attempt(root, 1)
    root.rename(tmp_path / "moved")
    assert not remake(own, attempts(tmp_path, 1, 2))  # the later one may have lost it too
    assert not root.exists()
    assert not remake(own, tmp_path / "no such run")
    assert not root.exists()


def test_it_is_not_made_again_over_what_is_there(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    own = claim_attempt(root, 1)
    shutil.rmtree(own.staging)
    assert not remake(own, attempts(tmp_path, 1))
    shutil.rmtree(root)
    root.touch()
    assert not remake(own, tmp_path / "attempts")
    assert root.is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempts", "checkpoints"]


def test_an_attempt_that_nothing_follows_leaves_nothing(tmp_path: Path) -> None:
    own = claim_attempt(tmp_path, 3)
    leave_attempt(own)
    assert names(tmp_path) == []
    leave_attempt(own)
    own = claim_attempt(tmp_path, 4)
    leave(own.staging, f"{NAME}.ab")
    leave_attempt(own)
    assert names(tmp_path) == [".staging-4"]


def test_one_that_has_taken_over_from_another_leaves_a_trace_for_it(tmp_path: Path) -> None:
    stale = make_saver(tmp_path, attempt=1)
    assert save(stale, 1, weights(1)).ok
    later = claim_attempt(tmp_path, 2)
    leave_attempt(later, leaves_trace=True)
    assert [name for name in names(tmp_path) if name.startswith(".")] == [".retired-2"]
    for step in (2, 3):
        assert save(stale, step, weights(99)).reason == "fenced by attempt 2"
    leave_attempt(claim_attempt(tmp_path, 3))
    assert [name for name in names(tmp_path) if name.startswith(".")] == []
