from __future__ import annotations

import dataclasses
import json

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_fw.checkpoint import (
    ChunkEntry,
    FileEntry,
    HashAlgorithm,
    Manifest,
    NewerFormatError,
    TensorEntry,
)
from hetero_fw.errors import CheckpointError


def chunk(**changes: object) -> ChunkEntry:
    base = ChunkEntry(
        offsets=(0, 0), sizes=(2, 3), file="shard-00000.bin", byte_offset=0, length=24, digest="c"
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def manifest(**changes: object) -> Manifest:
    base = Manifest(
        step=500,
        attempt=2,
        plan_fingerprint="abc",
        world_size=1,
        created_time_s=1.5,
        reason="interval",
        is_finite=True,
        files=(FileEntry(name="shard-00000.bin", size=24, digest="f"),),
        tensors={"model.w": TensorEntry(size=(2, 3), dtype="float32", chunks=(chunk(),))},
        state={"lr": 1e-3, "best": float("inf"), "names": ["a", "ü"], "none": None},
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def with_chunk(**changes: object) -> Manifest:
    tensor = TensorEntry(size=(2, 3), dtype="float32", chunks=(chunk(**changes),))
    return manifest(tensors={"model.w": tensor})


def with_own_hash(payload: dict[str, object]) -> str:
    canonical = json.dumps(payload, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({"xxh3_128": xxhash.xxh3_128_hexdigest(canonical), **payload})


def payload_of(text: str) -> dict[str, object]:
    payload = json.loads(text)
    del payload["xxh3_128"]
    return dict(payload)


@pytest.mark.parametrize("algorithm", HashAlgorithm)
def test_round_trip(algorithm: HashAlgorithm) -> None:
    original = manifest(hash=algorithm)
    assert Manifest.from_json(original.to_json()) == original
    assert original.size_bytes == 24


@pytest.mark.parametrize("algorithm", HashAlgorithm)
def test_digests_stand_under_the_name_of_their_algorithm(algorithm: HashAlgorithm) -> None:
    payload = json.loads(manifest(hash=algorithm).to_json())
    assert payload["hash"] == algorithm
    assert payload["files"] == [{"name": "shard-00000.bin", "size": 24, algorithm: "f"}]
    (written,) = payload["tensors"]["model.w"]["chunks"]
    assert list(written)[-1] == algorithm
    assert written[algorithm] == "c"


def test_one_that_names_no_algorithm_is_of_the_default() -> None:
    payload = payload_of(manifest().to_json())
    assert payload.pop("hash") == "xxh3_128"
    assert Manifest.from_json(with_own_hash(payload)) == manifest()


def test_an_unknown_algorithm_is_named_and_no_damage() -> None:
    payload = {**payload_of(manifest().to_json()), "hash": "sha3_512"}
    with pytest.raises(NewerFormatError, match=r"'sha3_512', this release knows xxh3_128, sha256"):
        Manifest.from_json(with_own_hash(payload))


def test_a_damaged_name_of_the_algorithm_is_damage() -> None:
    text = manifest(hash=HashAlgorithm.SHA256).to_json().replace('"hash": "sha', '"hash": "shb')
    with pytest.raises(CheckpointError, match="own hash") as caught:
        Manifest.from_json(text)
    assert not isinstance(caught.value, NewerFormatError)


def test_digests_of_another_algorithm_than_it_names_are_none() -> None:
    payload = {**payload_of(manifest().to_json()), "hash": "sha256"}
    with pytest.raises(CheckpointError, match="'sha256'"):
        Manifest.from_json(with_own_hash(payload))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_no_changed_character_passes_for_the_original(data: st.DataObject) -> None:
    text = manifest().to_json()
    position = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(codec="ascii").filter(lambda c: c != text[position]))
    try:
        read = Manifest.from_json(text[:position] + other + text[position + 1 :])
    except CheckpointError:
        return
    assert read == manifest()  # white space, or another spelling of the same value


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000))
def test_no_truncated_manifest_is_accepted(length: int) -> None:
    text = manifest().to_json()
    with pytest.raises(CheckpointError):
        Manifest.from_json(text[: length % len(text)])


def test_a_later_writer_may_add_facts() -> None:
    payload = payload_of(manifest().to_json())
    payload["replicas"] = {"shard-00000.bin": ["node-1"]}
    assert Manifest.from_json(with_own_hash(payload)) == manifest()


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"format": "x"}', "[" * 100_000])
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError):
        Manifest.from_json(text)


def test_a_damaged_version_is_no_newer_release() -> None:
    text = manifest().to_json().replace('"version": 1', '"version": 9')
    with pytest.raises(CheckpointError, match="its own hash") as caught:
        Manifest.from_json(text)
    assert not isinstance(caught.value, NewerFormatError)


def test_a_newer_release_may_have_another_hash_of_its_own() -> None:
    payload = json.loads(manifest(version=2).to_json())
    payload["blake3"] = payload.pop("xxh3_128")
    with pytest.raises(NewerFormatError, match="version 2"):
        Manifest.from_json(json.dumps(payload))


def test_another_version_is_refused_by_name() -> None:
    text = manifest(version=2).to_json()
    with pytest.raises(CheckpointError, match="version 2"):
        Manifest.from_json(text)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", "", "manifest.json"])
def test_a_file_outside_the_directory_is_refused(name: str) -> None:
    text = manifest(files=(FileEntry(name=name, size=24, digest="f"),)).to_json()
    with pytest.raises(CheckpointError, match="not a name of a shard file"):
        Manifest.from_json(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"length": 20},
        {"byte_offset": 8},
        {"byte_offset": -4},
        {"file": "shard-00001.bin"},
        {"offsets": (1, 0)},
        {"offsets": (0,)},
    ],
)
def test_a_chunk_outside_its_tensor_or_file_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=r"model\.w"):
        Manifest.from_json(with_chunk(**changes).to_json())


@pytest.mark.parametrize("key", ["step", "attempt", "world_size"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), None, "x", [1]])
def test_a_number_that_is_none_is_refused(key: str, value: object) -> None:
    text = with_own_hash({**payload_of(manifest().to_json()), key: value})
    with pytest.raises(CheckpointError, match="lacks or garbles a field"):
        Manifest.from_json(text)


def test_an_infinite_size_is_refused() -> None:
    for changed in (
        manifest(files=(FileEntry(name="shard-00000.bin", size=float("inf"), digest="f"),)),  # type: ignore[arg-type]
        manifest(tensors={"w": TensorEntry(size=(float("inf"),), dtype="float32", chunks=())}),  # type: ignore[arg-type]
        with_chunk(byte_offset=float("inf")),
    ):
        with pytest.raises(CheckpointError, match="lacks or garbles a field"):
            Manifest.from_json(changed.to_json())


def test_what_nests_too_deep_is_refused() -> None:
    for depth in range(100, 1200, 3):
        text = f'{{"format": "hetero_fw.checkpoint", "state": {"[" * depth}{"]" * depth}}}'
        with pytest.raises(CheckpointError):
            Manifest.from_json(text)


def test_a_tensor_with_a_hole_is_refused() -> None:
    tensors = {"model.w": TensorEntry(size=(3, 3), dtype="float32", chunks=(chunk(),))}
    with pytest.raises(CheckpointError, match=r"chunks of tensor model\.w do not cover"):
        Manifest.from_json(manifest(tensors=tensors).to_json())


def test_an_unknown_dtype_is_refused() -> None:
    tensors = {"model.w": TensorEntry(size=(2, 3), dtype="load", chunks=(chunk(),))}
    with pytest.raises(CheckpointError, match="unknown dtype 'load'"):
        Manifest.from_json(manifest(tensors=tensors).to_json())
