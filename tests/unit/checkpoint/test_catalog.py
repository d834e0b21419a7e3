from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero_fw.checkpoint import (
    HashAlgorithm,
    PruneReport,
    checkpoint_path,
    find_restorable,
    leave_attempt,
    list_checkpoints,
    load_checkpoint,
    num_attempts,
    prune,
    read_manifest,
)
from hetero_fw.checkpoint.read_back import Intact, Saved
from hetero_fw.checkpoint.shard_file import FileHash
from hetero_fw.checkpoint.storage import StorageHangs
from hetero_fw.errors import CheckpointError
from hetero_fw.policies import AttemptStart, RetentionRule
from tests.unit.checkpoint.examples import (
    PREFIX,
    claimed,
    fill,
    make_saver,
    published,
    save,
    weights,
)

STEPS = [10, 20, 30]
SHARD = "shard-00000.bin"


@pytest.fixture(scope="module", params=[HashAlgorithm.XXH3_128])
def originals(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    fill(root, STEPS, size=4000, algorithm=request.param)
    return root


@pytest.fixture
def root(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals, tmp_path / "checkpoints"))


def newest(root: Path) -> Path:
    return checkpoint_path(root, PREFIX, 30)


def overwrite(path: Path, position: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(content)


def flip_bit(path: Path, position: int, bit: int = 0) -> None:
    byte = path.read_bytes()[position]
    overwrite(path, position, bytes([byte ^ (1 << bit)]))


def flip_in_shard(root: Path) -> str:
    flip_bit(newest(root) / SHARD, 1234)
    return SHARD


def truncate_shard(root: Path) -> str:
    path = newest(root) / SHARD
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    return SHARD


def lengthen_shard(root: Path) -> str:
    with (newest(root) / SHARD).open("ab") as file:
        file.write(b"x")
    return SHARD


def zero_a_page(root: Path) -> str:
    overwrite(newest(root) / SHARD, 4096, bytes(4096))
    return SHARD


def swap_shard(root: Path) -> str:
    shutil.copy(checkpoint_path(root, PREFIX, 20) / SHARD, newest(root) / SHARD)
    return SHARD


def remove_shard(root: Path) -> str:
    (newest(root) / SHARD).unlink()
    return SHARD


def stale_manifest(root: Path) -> str:
    shutil.copy(checkpoint_path(root, PREFIX, 20) / "manifest.json", newest(root))
    return "manifest"


def torn_manifest(root: Path) -> str:
    path = newest(root) / "manifest.json"
    path.write_text(path.read_text()[:-40])
    return "manifest.json"


def flip_in_manifest(root: Path) -> str:
    path = newest(root) / "manifest.json"
    flip_bit(path, path.read_text().index('"step": ') + 8)
    return "manifest.json"


def remove_manifest(root: Path) -> str:
    (newest(root) / "manifest.json").unlink()
    return "manifest.json"


def pipe_for_manifest(root: Path) -> str:
    remove_manifest(root)
    os.mkfifo(newest(root) / "manifest.json")
    return "manifest.json: "


def device_for_manifest(root: Path) -> str:
    remove_manifest(root)
    (newest(root) / "manifest.json").symlink_to("/dev/zero")
    return "manifest.json: "


def pipe_for_shard(root: Path) -> str:
    remove_shard(root)
    os.mkfifo(newest(root) / SHARD)
    return SHARD


DAMAGES: list[Callable[[Path], str]] = [
    flip_in_shard,
    truncate_shard,
    lengthen_shard,
    zero_a_page,
    swap_shard,
    remove_shard,
    stale_manifest,
    torn_manifest,
    flip_in_manifest,
    remove_manifest,
    pipe_for_manifest,
    device_for_manifest,
    pipe_for_shard,
]


def restorable(root: Path) -> tuple[int | None, list[tuple[Path, str]]]:
    rejected: list[tuple[Path, str]] = []
    info = find_restorable(root, PREFIX, lambda path, reason: rejected.append((path, reason)))
    return (None if info is None else info.step), rejected


def test_lists_newest_first(root: Path) -> None:
    infos = list_checkpoints(root, PREFIX)
    assert [info.step for info in infos] == [30, 20, 10]
    assert infos[0].path == newest(root)
    assert infos[0].size_bytes > 0
    assert list_checkpoints(root, "other") == ()
    assert list_checkpoints(root / "absent", PREFIX) == ()


def test_only_published_ones_are_listed(root: Path) -> None:
    newest(root).rename(root / ".staging-1" / newest(root).name)
    (root / "hetero_ckpt-step-00000040").write_text("a file")
    (root / "hetero_ckpt-step-00000050").mkdir()
    assert [info.step for info in list_checkpoints(root, PREFIX)] == [20, 10]


def test_the_newest_intact_one_is_restorable(root: Path) -> None:
    assert restorable(root) == (30, [])
    assert restorable(root / "absent") == (None, [])


@pytest.mark.parametrize("originals", HashAlgorithm, indirect=True)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_rejected_by_file_name_and_the_one_before_is_used(
    root: Path, damage: Callable[[Path], str]
) -> None:
    file_name = damage(root)
    step, rejected = restorable(root)
    assert step == 20
    assert [path for path, _ in rejected] == [newest(root)]
    assert file_name in rejected[0][1]


@pytest.mark.parametrize("originals", HashAlgorithm, indirect=True)
@pytest.mark.parametrize(
    "damage",
    [flip_in_shard, truncate_shard, zero_a_page, swap_shard, remove_shard, torn_manifest],
    ids=lambda damage: damage.__name__,
)
def test_damaged_bytes_do_not_load_even_without_verifying_first(
    root: Path, damage: Callable[[Path], str]
) -> None:
    file_name = damage(root)
    with pytest.raises(CheckpointError, match=file_name):
        load_checkpoint(newest(root), weights(0, size=4000))


def test_every_one_damaged_leaves_nothing_to_restore(root: Path) -> None:
    for step in STEPS:
        flip_bit(checkpoint_path(root, PREFIX, step) / SHARD, 7)
    step_found, rejected = restorable(root)
    assert step_found is None
    assert len(rejected) == 3


def pruned(root: Path, keep_latest_k: int, **options: Any) -> PruneReport:
    rule = RetentionRule(keep_latest_k=keep_latest_k)
    return prune(root, PREFIX, rule, into=claimed(root).retired, **options)


def never() -> bool:
    return False


def intact(root: Path, *steps: int) -> Intact:
    infos = [info for info in list_checkpoints(root, PREFIX) if info.step in steps]
    return Intact(
        checkpoints=frozenset(
            Saved(info.step, info.path.name, info.created_time_s) for info in infos
        )
    )


def test_prune_keeps_the_newest(root: Path) -> None:
    report = pruned(root, 2)
    assert [path.name for path in report.deleted] == ["hetero_ckpt-step-00000010"]
    assert report.intact.steps == {20, 30}
    assert [name[-2:] for name in published(root)] == ["20", "30"]


def test_prune_never_deletes_what_may_be_needed(root: Path) -> None:
    flip_in_shard(root)
    assert pruned(root, 2).deleted == ()
    assert restorable(root)[0] == 20


def test_prune_reads_nothing_when_nothing_can_go(root: Path) -> None:
    report = pruned(root, 3)
    assert report.deleted == ()
    assert report.intact.steps == frozenset()


def test_prune_trusts_what_was_verified_before(root: Path) -> None:
    report = pruned(root, 2, intact=intact(root, 20, 30))
    assert report.intact.steps == {20, 30}
    assert len(report.deleted) == 1


def test_reading_back_goes_on_where_it_was_cut_off(root: Path) -> None:
    reports = in_slices(root)
    assert len(reports) > 2
    assert all(report.deleted == () for report in reports[:-1])
    assert {30} in [report.intact.steps for report in reports]
    assert [path.name for path in reports[-1].deleted] == ["hetero_ckpt-step-00000010"]


def in_slices(root: Path) -> list[PruneReport]:
    """Prune as if there were time for a piece in each call."""
    reports = [pruned(root, 2, go_on=never)]
    while not reports[-1].is_complete:
        assert len(reports) < 50, "it never ends"
        reports.append(pruned(root, 2, go_on=never, intact=reports[-1].intact))
    return reports


@pytest.mark.parametrize("number", [0, 1])
def test_what_is_damaged_is_read_once_and_holds_nothing_up(root: Path, number: int) -> None:
    flip_bit(list_checkpoints(root, PREFIX)[number].path / SHARD, 7)
    reports = in_slices(root)
    assert reports[-1].intact.steps == {10, 20, 30} - {30 - 10 * number}
    assert [saved.step for saved in reports[-1].intact.damaged] == [30 - 10 * number]
    fill(root, [40], size=4000)
    again = pruned(root, 2, intact=reports[-1].intact)
    assert [path.name[-2:] for path in again.deleted] == [["10"], ["10", "20"]][number]


def test_older_ones_go_while_the_newest_is_still_read(root: Path) -> None:
    fill(root, [40], size=4000)
    report = pruned(root, 2, intact=intact(root, 20, 30), go_on=never)
    assert not report.is_complete
    assert [path.name[-2:] for path in report.deleted] == ["10"]
    assert report.intact.steps == {20, 30}
    fill(root, [50], size=4000)
    report = pruned(root, 2, intact=intact(root, 30), go_on=never)
    assert (report.is_complete, report.deleted) == (False, ())


def test_what_was_begun_is_read_before_what_is_newer(root: Path) -> None:
    info = list_checkpoints(root, PREFIX)[1]
    (file,) = read_manifest(info.path).files
    begun = Saved(info.step, info.path.name, info.created_time_s)
    known = Intact(files=frozenset({(begun, file.name)}), begun=begun)
    report = pruned(root, 2, intact=known, go_on=never)
    assert (report.is_complete, report.intact.steps) == (False, {20})


def test_what_was_known_of_a_file_that_is_another_by_now_does_not_count(root: Path) -> None:
    info = list_checkpoints(root, PREFIX)[0]
    (file,) = read_manifest(info.path).files
    known = frozenset({(Saved(info.step, info.path.name, info.created_time_s - 1.0), file.name)})
    flip_bit(info.path / SHARD, 7)
    report = pruned(root, 2, intact=Intact(files=known))
    assert report.intact.steps == {10, 20}
    assert report.deleted == ()


def test_what_is_given_up_judges_and_deletes_nothing(root: Path) -> None:
    fill(root, [40, 50], size=4000)

    def given_up() -> bool:
        raise StorageHangs("it was given up")

    with pytest.raises(StorageHangs):
        pruned(root, 2, go_on=given_up)
    assert len(published(root)) == 5
    assert pruned(root, 2).intact.steps == {40, 50}


def test_a_step_that_is_saved_again_is_read_again(root: Path) -> None:
    known = pruned(root, 2).intact
    assert known.steps == {20, 30}
    shutil.rmtree(newest(root))
    fill(root, [30, 40], size=4000)
    flip_in_shard(root)
    report = pruned(root, 2, intact=known)
    assert report.intact.steps == {20, 40}
    assert report.deleted == ()


def test_a_file_that_cannot_be_read_now_is_not_taken_for_damaged(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(found: FileHash, go_on: Any = None) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(FileHash, "read_on", refused)
        report = pruned(root, 2)
    assert (report.deleted, report.intact.damaged) == ((), frozenset())
    assert pruned(root, 2, intact=report.intact).intact.steps == {20, 30}


def test_every_piece_that_is_read_is_told(root: Path) -> None:
    told: list[int] = []

    def go_on() -> bool:
        told.append(1)
        return True

    pruned(root, 2, go_on=go_on)
    assert len(told) >= 3  # a piece of each of two files, and between them


def test_prune_deletes_nothing_where_it_may_not(root: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        prune(root, PREFIX, RetentionRule(keep_latest_k=2), into=root / ".retired-0")
    assert len(published(root)) == 3


def test_attempts_are_counted_on_from_checkpoints_where_nothing_else_tells(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    assert num_attempts(root) == 0
    for attempt in (2, 5):
        assert save(make_saver(root, attempt=attempt), 10 * attempt, weights(1)).ok
    assert num_attempts(root) == 6
    leave_attempt(claimed(root, 5))
    assert num_attempts(root) == 6
    (checkpoint_path(root, PREFIX, 50) / "manifest.json").write_text("{")
    assert num_attempts(root) == 3


def test_what_attempts_have_left_behind_comes_last(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for attempt, step in ((1, 10), (1, 30), (2, 20)):
        assert save(make_saver(root, attempt=attempt), step, weights(step)).ok
    starts = (AttemptStart(attempt=2, start_step=10, has_saved=True),)
    rejected: list[str] = []

    def found() -> int | None:
        info = find_restorable(root, PREFIX, lambda path, reason: rejected.append(reason), starts)
        return info.step if info is not None else None

    assert (found(), rejected) == (20, [])
    for step in (20, 10):
        shutil.rmtree(checkpoint_path(root, PREFIX, step))
    assert (found(), rejected) == (30, [])
    shutil.rmtree(checkpoint_path(root, PREFIX, 30))
    assert found() is None
