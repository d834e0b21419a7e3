"""A process that is killed at any point of a save leaves a run that resumes, and nothing else."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hetero_fw.checkpoint import SavePoint, place
from tests.distributed.interrupted_saves import (
    KEEP_TWO,
    SAVE_TIMEOUT_S,
    START_S,
    Interruption,
    interruption_at,
    restorable,
    save_together,
    saving_process,
)
from tests.unit.checkpoint.examples import claimed, fill, make_saver, published, save, weights

POINTS = list(SavePoint)
OF_A_NEW_STEP = [point for point in POINTS if point is not SavePoint.SET_ASIDE]
IS_PUBLISHED_AT = POINTS.index(SavePoint.PUBLISHED)
KILL = signal.SIGKILL


def kill_in_save(
    root: Path, step: int, value: int, interruption: Interruption, *, has_writer: bool = False
) -> None:
    with saving_process(root, step, value, interruption, has_writer=has_writer) as process:
        process.join(START_S)
        assert process.exitcode == -KILL


def save_again(root: Path, step: int, value: int) -> None:
    """The next attempt clears up and can save the interrupted step."""
    saver = make_saver(root, attempt=2, retention=KEEP_TWO)
    assert save(saver, step, weights(value)).ok
    assert restorable(root) == (step, value)
    assert len(published(root)) == 2
    hidden = {path.name for path in root.iterdir()} - set(published(root))
    assert hidden == {".staging-2", ".retired-2"}
    assert not [path for name in hidden for path in (root / name).iterdir()]


@pytest.mark.parametrize("has_writer", [False, True], ids=["thread", "tree"])
@pytest.mark.parametrize("point", OF_A_NEW_STEP)
def test_what_loads_is_the_last_published_step(
    tmp_path: Path, point: SavePoint, has_writer: bool
) -> None:
    root = tmp_path / "checkpoints"
    fill(root, [1, 2, 3])
    kill_in_save(root, 4, 4, interruption_at(point, KILL), has_writer=has_writer)
    last = 4 if POINTS.index(point) >= IS_PUBLISHED_AT else 3
    assert restorable(root) == (last, last)
    claimed(root, attempt=2)
    assert restorable(root) == (last, last)
    save_again(root, 4, 104)


@pytest.mark.parametrize(
    "point", [SavePoint.PUBLISHING, SavePoint.SET_ASIDE, SavePoint.PUBLISHED, SavePoint.RETIRING]
)
def test_replacing_a_checkpoint_never_loses_both(tmp_path: Path, point: SavePoint) -> None:
    root = tmp_path / "checkpoints"
    fill(root, [1, 2, 3])
    kill_in_save(root, 3, 103, interruption_at(point, KILL))
    claimed(root, attempt=2)
    is_replaced = POINTS.index(point) >= IS_PUBLISHED_AT
    assert restorable(root) == (3, 103 if is_replaced else 3)
    save_again(root, 3, 203)


def test_a_torn_manifest_is_never_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tear(path: Path, text: str) -> None:
        path.write_text(text[: len(text) // 2])
        raise OSError(5, "Input/output error")

    saver = make_saver(tmp_path)
    assert save(saver, 1, weights(1)).ok
    with monkeypatch.context() as context:
        context.setattr(place, "write_text", tear)
        assert not save(saver, 2, weights(2)).ok
    assert restorable(tmp_path) == (1, 1)
    assert save(saver, 2, weights(2)).ok


@pytest.mark.parametrize(
    ("victim", "point", "is_published"),
    [
        (0, SavePoint.STAGED, False),
        (0, SavePoint.SHARD_SYNCED, False),
        (0, SavePoint.PUBLISHING, False),
        (0, SavePoint.PUBLISHED, True),
        (1, SavePoint.STAGED, False),
        (1, SavePoint.SHARD_PIECE, False),
        (1, SavePoint.SHARD_SYNCED, False),
    ],
)
def test_no_rank_waits_longer_than_the_bound(
    tmp_path: Path, victim: int, point: SavePoint, is_published: bool
) -> None:
    root = tmp_path / "checkpoints"
    claimed(root)
    (survivor,) = save_together(root, victim, Interruption(point=point, signal_number=KILL))
    assert survivor["ok"] == [True, False]
    assert survivor["wait_s"] < 1.25 * SAVE_TIMEOUT_S + 2.0
    assert ("no verdict from rank 0" if victim == 0 else "ranks [1]") in survivor["reason"]
    last = 2 if is_published else 1
    assert restorable(root) == (last, last)
    saver = make_saver(root, attempt=2)
    assert save(saver, 2, weights(102)).ok
    assert restorable(root) == (2, 102)
