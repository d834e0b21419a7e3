"""Checkpoints on an object store that lives in this process."""

from __future__ import annotations

import multiprocessing
import pickle
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from upath import UPath

from hetero_fw.checkpoint import (
    HashAlgorithm,
    Metric,
    ObjectPlace,
    SavePoint,
    compare_checkpoints,
    export_weights,
    find_restorable,
    list_checkpoints,
    published_paths,
    read_manifest,
    shard_file,
    verify_checkpoint,
)
from hetero_fw.checkpoint.object_versions import fence_key, record_key
from hetero_fw.checkpoint.read_back import Intact
from hetero_fw.checkpoint.storage import StorageError
from hetero_fw.errors import CheckpointError
from hetero_fw.policies import RetentionRule, decide_room
from tests.unit.checkpoint.examples import PREFIX, weights
from tests.unit.checkpoint.object_saves import OneSave, manifest_of, save_at, shard_of, value_of

KEEP_TWO = RetentionRule(keep_latest_k=2)


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/runs/mine"


def begin(url: str, attempt: int = 0) -> ObjectPlace:
    place = ObjectPlace(url=url, attempt=attempt)
    place.claim()
    return place


def steps(place: ObjectPlace) -> list[int]:
    return [info.step for info in list_checkpoints(place.root, PREFIX)]


def names(place: ObjectPlace) -> set[str]:
    """Everything that is stored, but the claims of attempts."""
    keys = {
        path.removeprefix(place.root.path + "/") for path in place.root.fs.find(place.root.path)
    }
    return {key for key in keys if not key.startswith(".attempts/")}


def claims(place: ObjectPlace) -> set[str]:
    folder = place.root / ".attempts"
    return {f".attempts/{path.rpartition('/')[2]}" for path in place.root.fs.find(folder.path)}


def never() -> bool:
    return False


def flip(path: UPath) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(bytes(content))


def refuse(path: Any, reason: str) -> None:
    pytest.fail(f"{path}: {reason}")


@pytest.mark.parametrize("algorithm", HashAlgorithm)
def test_saved_listed_verified_and_loaded(
    url: str, tmp_path: Any, algorithm: HashAlgorithm
) -> None:
    place = begin(url)
    for step in (10, 20):
        save_at(place, step, algorithm=algorithm)
    assert steps(place) == [20, 10]
    info = find_restorable(place.root, PREFIX, refuse)
    assert info is not None
    assert (info.step, info.attempt, info.reason) == (20, 0, "test")
    verify_checkpoint(info)
    assert value_of(info.path) == 20
    older = list(published_paths(place.root, PREFIX))[1]
    assert len(list(compare_checkpoints(older, info.path))) == 4
    assert export_weights(info.path, tmp_path / "out.safetensors") == 3


def test_it_exists_when_its_manifest_does(url: str) -> None:
    place = begin(url)
    seen: dict[SavePoint, list[int]] = {}
    save_at(place, 10, on_point=lambda point: seen.setdefault(point, steps(place)))
    assert steps(place) == [10]
    assert seen.pop(SavePoint.PUBLISHED) == [10]
    assert set(seen) == {
        *(SavePoint.WRITING_SHARD, SavePoint.SHARD_PIECE, SavePoint.SHARD_WRITTEN),
        *(SavePoint.SHARD_SYNCED, SavePoint.WRITING_MANIFEST, SavePoint.PUBLISHING),
    }
    assert all(before == [] for before in seen.values())


def test_what_a_rank_did_not_write_is_not_published(url: str) -> None:
    place = begin(url)
    save = OneSave(step=10)
    layout, content = shard_of(weights(10))
    shard = place.write_shard(save, content, layout)
    place.root.joinpath(place.location(save).name, layout.file_name).write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"shard-00000\.bin: has 5 bytes"):
        place.publish(save, manifest_of(save, 0, layout, shard))
    place.discard(save, layout.file_name)
    with pytest.raises(CheckpointError, match=r"shard-00000\.bin: is missing"):
        place.publish(save, manifest_of(save, 0, layout, shard))
    assert names(place) == set()


def test_a_failed_step_can_be_saved_again(url: str) -> None:
    place = begin(url)
    save = OneSave(step=10)
    layout, content = shard_of(weights(1, 50))
    shard = place.write_shard(save, content, layout)
    place.discard(save, layout.file_name)
    save_at(place, 10, value=2)
    # The manifest of the save that was given up arrives after all.
    late = manifest_of(save, 0, layout, shard)
    (place.location(save) / "manifest.json").write_bytes(late.to_json().encode())
    rejected: list[str] = []
    info = find_restorable(place.root, PREFIX, lambda path, reason: rejected.append(reason))
    assert info is not None
    assert value_of(info.path) == 2
    assert all("shard-00000.bin" in reason for reason in rejected)


@pytest.mark.parametrize("algorithm", HashAlgorithm)
def test_damage_is_rejected_by_file_name(url: str, algorithm: HashAlgorithm) -> None:
    place = begin(url)
    for step in (10, 20, 30):
        save_at(place, step, algorithm=algorithm)
    newest, middle, _ = published_paths(place.root, PREFIX)
    flip(newest / "shard-00000.bin")
    with pytest.raises(CheckpointError, match=rf"shard-00000\.bin: bytes .* \({algorithm}\)"):
        value_of(newest)
    (middle / "manifest.json").write_bytes(b"{}")
    rejected: list[str] = []
    info = find_restorable(place.root, PREFIX, lambda path, reason: rejected.append(reason))
    assert info is not None
    assert info.step == 10
    assert "shard-00000.bin" in rejected[0]
    assert "manifest.json" in rejected[1]
    assert steps(place) == [30, 10]


def test_a_later_attempt_accepts_what_was_published_and_clears_the_rest(url: str) -> None:
    first = begin(url, 0)
    save_at(first, 10)
    unfinished = OneSave(step=20)
    layout, content = shard_of(weights(20))
    first.write_shard(unfinished, content, layout)
    assert len(names(first)) == 3
    second = begin(url, 1)
    assert steps(second) == [10]
    assert len(names(second)) == 2
    assert claims(second) == {fence_key(1), record_key(1)}
    save_at(second, 20)
    third = begin(url, 5)
    assert steps(third) == [20, 10]


def test_an_attempt_begins_once_and_in_order(url: str) -> None:
    place = begin(url, 3)
    with pytest.raises(CheckpointError, match="attempt 3 has begun before"):
        place.claim()
    with pytest.raises(
        CheckpointError, match=r"attempt 2 is fenced by attempt 3.*delete \.attempts"
    ):
        begin(url, 2)
    assert place.fenced_by() is None
    begin(url, 4)
    assert place.fenced_by() == 4


def fenced(place: ObjectPlace) -> Callable[[SavePoint], None]:
    """Lets a later attempt begin at the first of the points it is called at."""

    def take_over(point: SavePoint) -> None:
        if place.fenced_by() is None:
            begin(place.url, place.attempt + 1)

    return take_over


POINTS = [
    SavePoint.WRITING_SHARD,
    SavePoint.SHARD_PIECE,
    SavePoint.SHARD_SYNCED,
    SavePoint.WRITING_MANIFEST,
    SavePoint.PUBLISHING,
]


@pytest.mark.parametrize("at", POINTS)
def test_a_stale_attempt_publishes_nothing(url: str, at: SavePoint) -> None:
    stale = begin(url)
    save_at(stale, 10)

    def on_point(point: SavePoint) -> None:
        if point is at:
            begin(url, 1)

    with pytest.raises(CheckpointError):
        save_at(stale, 20, on_point=on_point)
    fresh = ObjectPlace(url=url, attempt=1)
    assert steps(fresh) == [10]
    save_at(fresh, 20)
    assert steps(fresh) == [20, 10]


def test_what_a_stale_attempt_puts_after_the_look_never_existed(url: str) -> None:
    stale = begin(url)
    save_at(stale, 10)
    save = OneSave(step=20)
    layout, content = shard_of(weights(20))
    shard = stale.write_shard(save, content, layout)
    fresh = begin(url, 1)
    # Its request was on the way when it was fenced: it is stored, whole and intact.
    stale.root.fs.pipe_file((stale.location(save) / layout.file_name).path, bytes(content))
    text = manifest_of(save, 0, layout, shard).to_json()
    (stale.location(save) / "manifest.json").write_bytes(text.encode())
    assert steps(fresh) == [10]
    assert [path.name for path in published_paths(fresh.root, PREFIX)] != []
    later = begin(url, 2)
    assert steps(later) == [10]
    assert len(names(later)) == 2


def test_what_was_reported_as_published_is_accepted(url: str) -> None:
    """A later attempt has fenced, and has not looked yet."""
    stale = begin(url)
    save = OneSave(step=10)
    layout, content = shard_of(weights(10))
    shard = stale.write_shard(save, content, layout)
    stale.publish(save, manifest_of(save, 0, layout, shard))
    (stale.root / fence_key(1)).write_bytes(b"{}")  # it died behind this
    with pytest.raises(CheckpointError, match="fenced by attempt 1"):
        save_at(stale, 20)
    stale.discard(save, layout.file_name)
    assert steps(begin(url, 2)) == [10]


def test_a_stale_attempt_deletes_nothing(url: str) -> None:
    stale = begin(url)
    for step in (10, 20, 30, 40):
        save_at(stale, step)
    before = names(stale)
    with pytest.raises(CheckpointError, match="fenced by attempt 1"):
        stale.prune(PREFIX, KEEP_TWO, on_point=fenced(stale))
    assert names(stale) == before
    with pytest.raises(CheckpointError, match="fenced by attempt 1"):
        stale.prune(PREFIX, KEEP_TWO)
    assert names(stale) == before


def test_retention(url: str) -> None:
    place = begin(url)
    for step, value in ((10, 1.0), (20, 3.0), (30, 2.0), (40, 4.0)):
        save_at(place, step, metric=Metric(name="loss", value=value))
    passed: list[SavePoint] = []
    rule = RetentionRule(keep_latest_k=2, keep_best=1, monitor="loss")
    report = place.prune(PREFIX, rule, on_point=passed.append)
    assert [path.name.partition(".")[0] for path in report.deleted] == [f"{PREFIX}-step-00000020"]
    assert report.intact.steps == {30, 40}
    assert steps(place) == [40, 30, 10]
    assert passed == [SavePoint.RETIRING, SavePoint.RETIRED, SavePoint.DELETED]
    assert len(names(place)) == 6


def test_what_is_not_whole_protects_nothing(url: str) -> None:
    place = begin(url)
    for step in (10, 20, 30, 40):
        save_at(place, step)
    for path in list(published_paths(place.root, PREFIX))[:2]:
        (path / "shard-00000.bin").write_bytes(b"short")
    assert place.prune(PREFIX, KEEP_TWO).deleted == ()
    assert steps(place) == [40, 30, 20, 10]


def test_what_was_damaged_at_its_full_size_protects_nothing(url: str) -> None:
    place = begin(url)
    for step in (10, 20, 30, 40):
        save_at(place, step)
    newest, second, *_ = published_paths(place.root, PREFIX)
    flip(newest / "shard-00000.bin")
    report = place.prune(PREFIX, KEEP_TWO)
    assert [path.name.partition(".")[0] for path in report.deleted] == [f"{PREFIX}-step-00000010"]
    assert report.intact.steps == {20, 30}
    flip(second / "shard-00000.bin")
    save_at(place, 50)
    report = place.prune(PREFIX, KEEP_TWO)
    assert report.intact.steps == {20, 50}
    assert steps(place) == [50, 40, 20]


def test_reading_back_goes_on_where_it_was_cut_off(url: str) -> None:
    place = begin(url)
    for step in (10, 20, 30):
        save_at(place, step)
    intact, rounds = Intact(), 0
    while not (report := place.prune(PREFIX, KEEP_TWO, intact=intact, go_on=never)).is_complete:
        assert report.deleted == ()
        intact, rounds = report.intact, rounds + 1
        assert rounds < 10
    assert rounds > 1  # a piece in each
    assert steps(place) == [30, 20]
    # What is known is not read again, and nothing is where nothing can go.
    for path in published_paths(place.root, PREFIX):
        flip(path / "shard-00000.bin")
    save_at(place, 40)
    report = place.prune(PREFIX, KEEP_TWO, intact=report.intact)
    assert report.intact.steps == {30, 40}
    assert place.prune(PREFIX, KEEP_TWO).intact.steps == frozenset()


def test_a_storage_that_fails_while_it_is_read_back_gives_nothing_up(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = begin(url)
    for step in (10, 20, 30, 40):
        save_at(place, step)

    def refused(file: UPath, begin: int) -> Any:
        raise StorageError(f"{file}: slow down", is_transient=True)

    monkeypatch.setattr(shard_file, "read_pieces", refused)
    with pytest.raises(StorageError, match=r"shard-00000\.bin: slow down"):
        place.prune(PREFIX, KEEP_TWO)
    assert steps(place) == [40, 30, 20, 10]


def test_a_version_is_superseded_by_one_that_was_read_back(url: str) -> None:
    place = begin(url)
    for value in (1, 2):
        save_at(place, 10, value=value)
    save_at(place, 20)
    flip(list(published_paths(place.root, PREFIX))[1] / "shard-00000.bin")
    place.prune(PREFIX, KEEP_TWO)
    assert len(list(published_paths(place.root, PREFIX))) == 3


def test_what_is_known_of_a_version_says_nothing_of_another(url: str) -> None:
    place = begin(url)
    for step in (10, 20, 30):
        save_at(place, step)
    known = place.prune(PREFIX, KEEP_TWO).intact
    assert known.steps == {20, 30}
    save_at(place, 30, value=5)
    flip(next(iter(published_paths(place.root, PREFIX))) / "shard-00000.bin")
    report = place.prune(PREFIX, KEEP_TWO, intact=known)
    assert report.intact.steps == {20}
    assert len(list(published_paths(place.root, PREFIX))) == 3  # both of step 30


def test_the_newest_intact_version_of_a_step_supersedes_the_others(url: str) -> None:
    place = begin(url)
    versions = [save_at(place, 10, value=value) for value in (1, 2, 3)]
    save_at(place, 20)
    by_age = list(published_paths(place.root, PREFIX))
    assert len(by_age) == 4
    (by_age[1] / "shard-00000.bin").write_bytes(b"short")
    place.prune(PREFIX, KEEP_TWO)
    left = list(published_paths(place.root, PREFIX))
    assert [path.name for path in left] == [by_age[0].name, by_age[2].name]
    assert len(versions) == 3


def test_own_saves_that_were_given_up_are_removed(url: str) -> None:
    place = begin(url)
    layout, content = shard_of(weights(20))
    place.write_shard(OneSave(step=20), content, layout)
    save_at(place, 30)
    place.write_shard(OneSave(step=40), content, layout)  # may be under way
    place.prune(PREFIX, KEEP_TWO)
    kept = {name.partition(".")[0][-2:] for name in names(place)}
    assert kept == {"30", "40"}


def test_checkpoints_that_were_copied_there_count(url: str) -> None:
    place = begin(url)
    save = save_at(place, 10)
    root = place.root
    root.fs.mv(place.location(save).path, (root / save.name).path, recursive=True)
    second = begin(url, 1)
    assert steps(second) == [10]
    save_at(second, 10)
    assert [path.name == save.name for path in published_paths(root, PREFIX)] == [False, True]


@pytest.mark.parametrize("content", [b"[]", b'{"accepts": []}', b'{"accepts": "abc"}', b"[" * 9999])
def test_a_garbled_record_is_told_and_not_guessed_at(url: str, content: bytes) -> None:
    place = begin(url)
    (place.root / record_key(0)).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"000000\.accepts\.json is not a list"):
        steps(place)


def test_no_bit_of_a_record_can_flip_unseen(url: str) -> None:
    place = begin(url)
    save = save_at(place, 10)
    second = begin(url, 1)
    record = place.root / record_key(1)
    sound = record.read_bytes()
    assert save.token.encode() in sound
    for bit in range(0, 8 * len(sound), 7):
        garbled = bytearray(sound)
        garbled[bit // 8] ^= 1 << bit % 8
        record.write_bytes(bytes(garbled))
        try:
            assert steps(second) == [10]  # a blank between two names, say
        except CheckpointError:
            with pytest.raises(CheckpointError):
                begin(url, 2)  # deletes nothing
            (place.root / fence_key(2)).unlink(missing_ok=True)
    record.write_bytes(sound)
    assert steps(begin(url, 3)) == [10]


def test_it_is_plain_data(url: str) -> None:
    place = ObjectPlace(url="s3://bucket/run", attempt=1, options={"secret": "s3cr3t-value"})
    again = pickle.loads(pickle.dumps(place))
    assert again == place
    assert again.options == place.options
    assert "s3cr3t" not in f"{place} {place!r} {place.root!r} {place.root}"


def _steps_in_child(place: ObjectPlace, results: Any) -> None:
    save_at(place, 20)
    results.put(steps(place))


def test_it_works_in_another_process(url: str) -> None:
    place = begin(url)
    save_at(place, 10)
    for method, expected in (("fork", [20, 10]), ("spawn", [20])):
        context = multiprocessing.get_context(method)
        results = context.Queue()
        process = context.Process(target=_steps_in_child, args=(place, results))
        process.start()
        assert results.get(timeout=60) == expected
        process.join(30)
        assert process.exitcode == 0


def test_manifest_of_a_remote_checkpoint_names_the_file(url: str) -> None:
    place = begin(url)
    save = save_at(place, 10)
    assert read_manifest(place.location(save)).step == 10
    with pytest.raises(CheckpointError, match=r"absent/manifest\.json: not found"):
        read_manifest(place.root / "absent")


def test_room_is_made_in_an_object_store_too(url: str) -> None:
    place = begin(url)
    for step in (10, 20, 30):
        save_at(place, step)
    report = place.prune(PREFIX, RetentionRule(keep_latest_k=3), decide=decide_room)
    assert report.rule == KEEP_TWO
    assert steps(place) == [30, 20]
    assert place.prune(PREFIX, KEEP_TWO, decide=decide_room).deleted == ()
