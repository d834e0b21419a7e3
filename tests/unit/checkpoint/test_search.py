"""The search for the newest checkpoint on a remote storage, which keeps versions of a step."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_fw.checkpoint import (
    CheckpointSaver,
    Filled,
    FoundCheckpoint,
    Manifest,
    ObjectPlace,
    Ranks,
    Rejection,
    TierRoot,
    fill_from,
    find_candidates,
    flatten_training_state,
    list_checkpoints,
    load_newest,
    restore_training_state,
)
from hetero_fw.checkpoint.loading import fill_tensors
from hetero_fw.checkpoint.manifest import MANIFEST_NAME, read_manifest
from hetero_fw.checkpoint.object_store import ObjectStore
from hetero_fw.checkpoint.storage import StoragePath
from hetero_fw.errors import CheckpointError
from hetero_fw.policies import AttemptStart, find_departure
from tests.unit.checkpoint.examples import (
    PREFIX,
    WAIT_S,
    Model,
    content_digest,
    fill,
    make_optimizer,
    make_saver,
    save,
    trained,
    weights,
)
from tests.unit.checkpoint.object_saves import OneSave, manifest_of, save_at, shard_of, value_of


@dataclass(frozen=True, kw_only=True)
class Loaded:
    step: int
    path: str
    tiers: tuple[str, ...]
    value: int


@pytest.fixture
def place() -> ObjectPlace:
    own = ObjectPlace(url=f"memory://{uuid.uuid4().hex}/mine", attempt=0)
    own.claim()
    return own


def later(place: ObjectPlace) -> ObjectPlace:
    own = ObjectPlace(url=place.url, attempt=place.attempt + 1)
    own.claim()
    return own


def load(
    *roots: StoragePath,
    rejected: list[Rejection] | None = None,
    refused_attempt: int = -1,
    starts: Sequence[AttemptStart] = (),
) -> Loaded | None:
    """The newest checkpoint that fills tensors, after all of these were compared."""
    tensors: dict[str, torch.Tensor] = {}

    def refuse(manifest: Manifest) -> str | None:
        return "it is refused" if manifest.attempt == refused_attempt else None

    def fill_weights(found: FoundCheckpoint) -> Filled:
        tensors.update(weights(-1, 50))
        return fill_from(found, tensors)

    candidates = find_candidates(
        Ranks(None),
        [TierRoot(tier=f"tier{n}", path=root) for n, root in enumerate(roots)],
        PREFIX,
        refuse=refuse,
        depart=lambda manifest: find_departure(manifest.step, manifest.attempt, starts),
        on_rejected=(rejected if rejected is not None else []).append,
        patience_s=0.0,
    )
    loaded = load_newest(candidates, fill_weights)
    if loaded is None:
        return None
    value = int(tensors["model.count"])
    assert all(torch.equal(tensors[name], saved) for name, saved in weights(value, 50).items())
    found, filled = loaded
    return Loaded(step=found.step, path=found.path, tiers=filled.tiers, value=value)


def value_in(*roots: StoragePath, **options: Any) -> int:
    loaded = load(*roots, **options)
    assert loaded is not None
    return loaded.value


def damage(place: ObjectPlace, save: OneSave, name: str) -> None:
    key = f"{place.location(save).name}/{name}"
    store = ObjectStore(place.root)
    content = bytearray(store.read(key))
    content[len(content) // 2] ^= 1
    store.put(key, bytes(content))


def test_nothing_is_there(place: ObjectPlace) -> None:
    assert load(place.root) is None
    assert load(ObjectPlace(url="memory://absent/mine", attempt=0).root) is None


def test_the_version_of_the_later_attempt_comes_first(place: ObjectPlace) -> None:
    save_at(place, 10)
    first = save_at(place, 20, value=21)
    second = later(place)
    newest = save_at(second, 20, value=22)
    assert value_in(second.root) == 22
    rejected: list[Rejection] = []
    damage(second, newest, "shard-00000.bin")
    loaded = load(second.root, rejected=rejected)
    assert loaded is not None
    assert loaded.path == str(place.location(first))
    assert loaded.value == 21
    assert [(r.step, r.path) for r in rejected] == [(20, str(second.location(newest)))]
    damage(second, newest, MANIFEST_NAME)
    assert value_in(second.root, rejected=rejected) == 21
    damage(place, first, "shard-00000.bin")
    assert value_in(second.root) == 10


def test_what_is_refused_leads_to_the_version_before(place: ObjectPlace) -> None:
    save_at(place, 20, value=21)
    second = later(place)
    save_at(second, 20, value=22)
    rejected: list[Rejection] = []
    assert value_in(second.root, refused_attempt=1, rejected=rejected) == 21
    assert [r.reason.endswith("it is refused") for r in rejected] == [True]


def test_what_an_older_attempt_puts_too_late_is_not_seen(place: ObjectPlace) -> None:
    save_at(place, 10)
    stale = OneSave(step=30)
    layout, content = shard_of(weights(30, 50))
    shard = place.write_shard(stale, content, layout)
    second = later(place)
    store = ObjectStore(place.root)
    name = place.location(stale).name
    store.put(f"{name}/{layout.file_name}", bytes(content))
    manifest = manifest_of(stale, 0, layout, shard).to_json()
    store.put(f"{name}/{MANIFEST_NAME}", manifest.encode())
    assert value_in(second.root) == 10


def test_a_shard_that_is_gone_or_short_is_named(place: ObjectPlace) -> None:
    saves = [save_at(place, step) for step in (10, 20, 30)]
    store = ObjectStore(place.root)
    missing = f"{place.location(saves[2]).name}/shard-00000.bin"
    short = f"{place.location(saves[1]).name}/shard-00000.bin"
    store.delete([missing])
    store.put(short, store.read(short)[:-1])
    rejected: list[Rejection] = []
    assert value_in(place.root, rejected=rejected) == 10
    assert [r.step for r in rejected] == [30, 20]
    assert f"{missing}: is missing" in rejected[0].reason
    assert f"{short}: has" in rejected[1].reason


def test_a_directory_and_a_remote_storage_are_searched_together(
    place: ObjectPlace, tmp_path: Path
) -> None:
    fill(tmp_path, [10, 20], size=50)
    save_at(place, 30)
    loaded = load(tmp_path, place.root)
    assert loaded is not None
    assert (loaded.step, loaded.tiers) == (30, ("tier1",))
    fill(tmp_path, [40], size=50)
    loaded = load(tmp_path, place.root)
    assert loaded is not None
    assert (loaded.step, loaded.tiers) == (40, ("tier0",))


def test_versions_that_were_copied_to_a_directory_are_found(
    place: ObjectPlace, tmp_path: Path
) -> None:
    save_at(place, 10)
    save_at(place, 20)
    for key in ObjectStore(place.root).list():
        copy = tmp_path / key
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(ObjectStore(place.root).read(key))
    assert value_in(tmp_path) == 20


def test_a_record_that_cannot_be_read_is_no_fresh_start(place: ObjectPlace) -> None:
    save_at(place, 10)
    second = later(place)
    (record,) = [key for key in ObjectStore(second.root).list() if "accepts" in key]
    ObjectStore(second.root).put(record, b"{")
    with pytest.raises(CheckpointError, match="not a list of accepted checkpoints"):
        load(second.root)


def test_training_is_restored_from_a_remote_path(place: ObjectPlace) -> None:
    module, optimizer = trained()
    tensors, state = flatten_training_state(module, optimizer)
    saver = CheckpointSaver(
        place=place,
        attempt=0,
        prefix=PREFIX,
        rank=0,
        world_size=1,
        store=None,
        process_group=None,
        is_async=True,
        plan_fingerprint="plan",
        on_event=lambda name, step, fields: None,
        timeout_s=WAIT_S,
    )
    saver.save(3, tensors, {"loop": 3, **state}, reason="test", may_be_infinite={"model.mask"})
    assert saver.wait(WAIT_S)
    (outcome,) = saver.poll()
    assert outcome.ok, outcome.reason
    saver.close(WAIT_S)
    assert outcome.path is not None
    assert [info.path for info in list_checkpoints(place.root, PREFIX)] == [outcome.path]
    other = Model()
    fresh = make_optimizer("adamw", other)
    assert restore_training_state(other, fresh, outcome.path)["loop"] == 3
    assert content_digest(other, fresh) == content_digest(module, optimizer)
    one = {"model.first.weight": torch.zeros(7, 5)}
    fill_tensors(outcome.path, read_manifest(outcome.path), one)
    assert torch.equal(one["model.first.weight"], module.first.weight)


def test_a_remote_checkpoint_is_read_by_its_path(place: ObjectPlace) -> None:
    assert value_of(place.location(save_at(place, 10))) == 10


def kept_by(root: Path, attempt: int, steps: Sequence[int]) -> None:
    saver = make_saver(root, attempt=attempt)
    for step in steps:
        assert save(saver, step, weights(step, 50)).ok


def broken(root: Path, step: int, name: str = "shard-00000.bin") -> Path:
    """Change a byte of a file of the checkpoint of `step`."""
    file = root / f"{PREFIX}-step-{step:08d}" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file


@pytest.fixture
def departed(tmp_path: Path) -> tuple[Path, Path]:
    """Attempt 0 has saved to nodes and at 50 to the storage, from which attempt 1 went on."""
    nodes, storage = tmp_path / "nodes", tmp_path / "storage"
    kept_by(nodes, 0, [80, 90])
    kept_by(storage, 0, [50])
    kept_by(storage, 1, [60, 70])
    return nodes, storage


STARTS = (
    AttemptStart(attempt=0, start_step=0, has_saved=True),
    AttemptStart(attempt=1, start_step=50, has_saved=True),
)


def test_what_a_later_attempt_has_left_behind_is_passed_over(departed: tuple[Path, Path]) -> None:
    rejected: list[Rejection] = []
    assert value_in(*departed, starts=STARTS, rejected=rejected) == 70
    assert [r.step for r in rejected] == [90, 80]
    assert rejected[0].reason.endswith(
        "step 90 of attempt 0 is passed over: attempt 1 went on from step 50"
    )
    assert value_in(*departed) == 90  # without a record


def test_it_serves_where_nothing_is_left_of_what_came_in_its_place(
    departed: tuple[Path, Path],
) -> None:
    nodes, storage = departed
    broken(storage, 70)
    assert value_in(*departed, starts=STARTS) == 60
    broken(storage, 60, MANIFEST_NAME)
    assert value_in(*departed, starts=STARTS) == 90
    shard = broken(nodes, 90)
    rejected: list[Rejection] = []
    assert value_in(*departed, starts=STARTS, rejected=rejected) == 80
    assert str(shard) in rejected[-1].reason  # also after it was told that it is passed over
    broken(nodes, 80)
    assert value_in(*departed, starts=STARTS) == 50


def test_it_serves_where_nothing_else_is_left(departed: tuple[Path, Path]) -> None:
    nodes, _ = departed
    assert value_in(nodes, starts=STARTS) == 90


def test_a_directory_is_told_of_once_with_all_that_is_wrong_in_it(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    for root in (near, far):
        fill(root, [10], size=50)
    manifest, shard = broken(near, 10, MANIFEST_NAME), broken(near, 10)
    (far / f"{PREFIX}-step-00000010" / MANIFEST_NAME).unlink()
    assert load(near, far) is None
    fill(tmp_path / "copy", [10], size=50)
    rejected: list[Rejection] = []
    assert value_in(near, tmp_path / "copy", rejected=rejected) == 10
    (rejection,) = rejected
    assert str(manifest) in rejection.reason
    assert str(shard) in rejection.reason
