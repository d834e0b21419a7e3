"""An attempt that is stopped while a new one takes over, and then goes on, changes nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hetero_fw.checkpoint import SavePoint
from tests.distributed.interrupted_saves import (
    KEEP_TWO,
    START_S,
    contents,
    interruption_at,
    restorable,
    result_of,
    saving_process,
    wait_until_stopped,
)
from tests.unit.checkpoint.examples import fill, make_saver, published, save, weights

POINTS = list(SavePoint)
# A stale save of a new step, where step 3 is the newest one, and one that replaces step 3.
NEW, REPLACED = 4, 3
REPLACEMENTS = [SavePoint.PUBLISHING, SavePoint.SET_ASIDE, SavePoint.PUBLISHED]
# What the attempt that takes over saves; nothing: it has only just begun.
SAVES, BEGINS = (4, 5), ()
CASES = [
    *((point, NEW, SAVES) for point in POINTS if point is not SavePoint.SET_ASIDE),
    *((point, REPLACED, SAVES) for point in REPLACEMENTS),
    *((point, REPLACED, BEGINS) for point in REPLACEMENTS),
    *((point, NEW, BEGINS) for point in (SavePoint.SHARD_PIECE, SavePoint.RETIRING)),
]


@pytest.mark.parametrize("has_writer", [False, True], ids=["thread", "tree"])
@pytest.mark.parametrize(("point", "step", "takeover_steps"), CASES)
def test_a_stopped_attempt_that_goes_on_publishes_and_deletes_nothing(
    tmp_path: Path,
    point: SavePoint,
    step: int,
    takeover_steps: tuple[int, ...],
    has_writer: bool,
) -> None:
    root = tmp_path / "checkpoints"
    fill(root, [1, 2, 3])
    interruption = interruption_at(point, signal.SIGSTOP)
    with saving_process(root, step, 100 + step, interruption, has_writer=has_writer) as stale:
        pids = wait_until_stopped(stale, root)
        saver = make_saver(root, attempt=2, retention=KEEP_TWO)
        for taken_step in takeover_steps:
            assert save(saver, taken_step, weights(200 + taken_step)).ok
        before = contents(root)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        stale.join(START_S)
        assert stale.exitcode == 0
    assert contents(root) == before
    result = result_of(root)
    was_published = POINTS.index(point) >= POINTS.index(SavePoint.PUBLISHED)
    assert result["ok"] is was_published
    if not was_published:
        assert result["reason"] == "fenced by attempt 2"
    if takeover_steps:
        assert restorable(root) == (5, 205)
        assert published(root) == ["hetero_ckpt-step-00000004", "hetero_ckpt-step-00000005"]
    else:
        assert restorable(root) == ((step, 100 + step) if was_published else (3, 3))


def test_a_stale_attempt_says_why_it_prunes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    fill(root, [1, 2, 3])
    interruption = interruption_at(SavePoint.RETIRING, signal.SIGSTOP)
    with saving_process(root, 4, 4, interruption) as stale:
        (pid,) = wait_until_stopped(stale, root)
        make_saver(root, attempt=2)
        os.kill(pid, signal.SIGCONT)
        stale.join(START_S)
    assert result_of(root)["warnings"] == [
        "old checkpoints were not removed: fenced by attempt 2; "
        "step 4 is safe, a restart goes on from it"
    ]
    assert len(published(root)) == 4
