"""A process that is killed anywhere in a save leaves a run that resumes, and nothing else."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hetero_fw.checkpoint import (
    checkpoint_path,
    commit,
    directories,
    find_restorable,
    load_checkpoint,
    remove_stale_temporaries,
    shard_file,
    writer,
)
from tests.unit.checkpoint.examples import PREFIX, make_saver, save, weights

START_S = 60.0


def die(*args: object, **kwargs: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def torn_write(descriptor: int, piece: memoryview) -> None:
    os.write(descriptor, piece[: len(piece) // 2])
    die()


def torn_text(path: Path, text: str) -> None:
    path.write_text(text[: len(text) // 2])
    die()


def die_before_second_rename() -> None:
    real, calls = Path.rename, []

    def rename(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) > 1:
            die()
        return real(self, target)

    Path.rename = rename  # type: ignore[method-assign,assignment]


# Where to die, and the step that must be restorable afterwards; step 1 is published before.
CRASH_POINTS: dict[str, tuple[Callable[[], object], int]] = {
    "before the shard": (lambda: setattr(writer, "write_own_shard", die), 1),
    "in the shard": (lambda: setattr(shard_file, "_write_all", torn_write), 1),
    "before the manifest": (lambda: setattr(writer, "commit", die), 1),
    "in the manifest": (lambda: setattr(commit, "write_text", torn_text), 1),
    "before publishing": (lambda: setattr(commit, "publish", die), 1),
    "after publishing": (lambda: setattr(directories, "sync_directory", die), 2),
}


def die_in_save(point: str, root: str, step: int) -> None:
    saver = make_saver(Path(root))
    if point == "between the renames":
        die_before_second_rename()
    else:
        CRASH_POINTS[point][0]()
    save(saver, step, weights(step))


def run_until_killed(point: str, root: Path, step: int) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "lightning.pytorch"])
    process = context.Process(target=die_in_save, args=(point, str(root), step))
    process.start()
    process.join(START_S)
    exitcode = process.exitcode
    process.kill()
    process.join(5.0)
    assert exitcode == -signal.SIGKILL


def restorable_step(root: Path) -> int:
    info = find_restorable(root, PREFIX, lambda path, reason: pytest.fail(reason))
    assert info is not None
    loaded = weights(0)
    load_checkpoint(info.path, loaded)
    assert torch.equal(loaded["model.weight"], weights(info.step)["model.weight"])
    return info.step


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_what_loads_is_the_last_published_step(tmp_path: Path, point: str) -> None:
    assert save(make_saver(tmp_path), 1, weights(1)).ok
    run_until_killed(point, tmp_path, step=2)
    assert restorable_step(tmp_path) == CRASH_POINTS[point][1]
    # The next attempt cleans up and can save the interrupted step.
    saver = make_saver(tmp_path, attempt=2)
    assert restorable_step(tmp_path) == CRASH_POINTS[point][1]
    assert save(saver, 2, weights(2)).ok
    assert restorable_step(tmp_path) == 2
    assert {path.name[-2:] for path in tmp_path.iterdir()} == {"01", "02"}


def test_replacing_a_checkpoint_never_loses_both(tmp_path: Path) -> None:
    assert save(make_saver(tmp_path), 1, weights(1)).ok
    run_until_killed("between the renames", tmp_path, step=1)
    assert not checkpoint_path(tmp_path, PREFIX, 1).exists()
    remove_stale_temporaries(tmp_path, PREFIX, attempt=2)
    assert restorable_step(tmp_path) == 1
    assert len(list(tmp_path.iterdir())) == 1
