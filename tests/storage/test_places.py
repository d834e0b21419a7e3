"""Checkpoints on real servers of each storage, with real faults."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_fw.checkpoint import (
    ObjectPlace,
    SavePoint,
    StorageError,
    compare_checkpoints,
    export_weights,
    find_restorable,
    published_paths,
    verify_checkpoint,
)
from hetero_fw.checkpoint.object_store import ObjectStore
from hetero_fw.checkpoint.object_versions import fence_key, record_key
from hetero_fw.checkpoint.storage import READ_TIMEOUT_S
from hetero_fw.errors import CheckpointError
from tests.fault_proxy import Fault, FaultProxy
from tests.s3_server import SECRET
from tests.storage.places import (
    begin,
    keys,
    open_place,
    steps,
    through,
    unfinished_uploads,
)
from tests.storage.uploading import (
    BIG,
    KEEP_TWO,
    saving_process,
    wait_until_killed,
    wait_until_stopped,
)
from tests.storage_server import BUCKET, StorageServer
from tests.unit.checkpoint.examples import PREFIX
from tests.unit.checkpoint.object_saves import save_at, value_of

# The server starts within seconds, but several processes share few cores.
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.parametrize("server", ["s3", "gs", "webhdfs"], indirect=True),
]


def test_round_trip(server: StorageServer, url: str, tmp_path: Path) -> None:
    place = begin(url)
    for step in (10, 20):
        save_at(place, step, size=BIG // 10)
    assert steps(place) == [20, 10]
    newest, older = published_paths(place.root, PREFIX)
    assert newest.name.startswith(f"{PREFIX}-step-00000020.0-")
    verify_checkpoint(newest)
    assert value_of(newest, BIG // 10) == 20
    info = find_restorable(place.root, PREFIX, lambda path, reason: pytest.fail(reason))
    assert info is not None
    assert info.path == newest
    assert [item.likeness for item in compare_checkpoints(older, newest)].count("different") == 3
    assert export_weights(newest, tmp_path / "out.safetensors") == 3


def test_large_objects_go_up_in_parts_and_come_back_whole(server: StorageServer, url: str) -> None:
    store = ObjectStore(begin(url).root)
    content = torch.randint(0, 256, (70 * 2**20 + 3,), dtype=torch.uint8)
    num_pieces: list[int] = []
    store.upload("big", content.numpy().data, lambda piece: num_pieces.append(piece.nbytes))
    assert len(num_pieces) == 5
    assert sum(num_pieces) == content.numel()
    assert store.list()["big"].size == content.numel()
    assert torch.equal(torch.frombuffer(bytearray(store.read("big")), dtype=torch.uint8), content)
    for size in (0, 1, 16 * 2**20):
        store.upload("small", content[:size].numpy().data, lambda piece: None)
        assert store.read("small") == content[:size].numpy().tobytes()


def test_only_one_attempt_of_a_number_begins(server: StorageServer, url: str) -> None:
    store = ObjectStore(open_place(url))
    store.put_new(fence_key(3), b"mine")
    store.put_new(fence_key(3), b"mine")  # as when the answer to the first was lost
    with pytest.raises(StorageError, match="somebody else's is there"):
        store.put_new(fence_key(3), b"theirs")
    assert store.read(fence_key(3)) == b"mine"
    with pytest.raises(CheckpointError, match="attempt 2 is fenced by attempt 3"):
        begin(url, 2)


def test_a_bucket_that_does_not_exist_is_told(server: StorageServer) -> None:
    root = open_place(f"{server.root().replace(BUCKET, 'no-such-bucket')}/mine")
    if server.scheme == "webhdfs":  # a directory as any other, which is made when it is needed
        assert list(published_paths(root, PREFIX)) == []
        return
    with pytest.raises(StorageError, match=r"no-such-bucket.*not (found|exist)") as caught:
        list(published_paths(root, PREFIX))
    assert not caught.value.is_transient


def test_the_manifest_is_put_last(server: StorageServer, url: str) -> None:
    place = begin(url)
    seen: dict[SavePoint, list[str]] = {}
    save = save_at(
        place,
        10,
        on_point=lambda point: seen.setdefault(
            point, [key.rpartition("/")[2] for key in keys(place)]
        ),
    )
    assert seen[SavePoint.SHARD_WRITTEN] == ["shard-00000.bin"]
    assert seen[SavePoint.PUBLISHING] == ["shard-00000.bin"]
    assert sorted(seen[SavePoint.PUBLISHED]) == ["manifest.json", "shard-00000.bin"]
    assert place.location(save) == next(published_paths(place.root, PREFIX))


@pytest.mark.parametrize(
    "point", [SavePoint.SHARD_PIECE, SavePoint.SHARD_WRITTEN, SavePoint.PUBLISHING]
)
def test_a_process_that_is_killed_leaves_nothing_committed(
    server: StorageServer, url: str, point: SavePoint
) -> None:
    place = begin(url)
    save_at(place, 10)
    with saving_process(place, 20, signal_at=(point, signal.SIGKILL)) as process:
        wait_until_killed(process)
    assert steps(place) == [10]
    save_at(place, 20)
    assert steps(place) == [20, 10]
    second = begin(url, 1)
    assert steps(second) == [20, 10]
    assert len(keys(second)) == 4
    assert unfinished_uploads(second) == []


def test_a_small_request_into_a_black_hole_ends_by_itself(
    server: StorageServer, proxy: FaultProxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = through(proxy, server, url).root
    ObjectStore(root).put("a", b"1")
    monkeypatch.setattr("hetero_fw.checkpoint.object_store.REQUEST_TIMEOUT_S", 1.0)
    monkeypatch.setattr("hetero_fw.checkpoint.hadoop_storage.READ_TIMEOUT_S", 1.0)
    store = ObjectStore(root)
    proxy.fault = Fault.BLACK_HOLE
    requests: list[Callable[[], Any]] = [
        lambda: store.put("a", b"2"),
        lambda: store.read("a"),
        lambda: store.delete(["a"]),
        store.list,
    ]
    for request in requests:
        began_s = time.monotonic()
        with pytest.raises(StorageError, match=r"no answer in time|timed out") as caught:
            request()
        assert caught.value.is_transient
        assert time.monotonic() - began_s < 5.0


@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.SLOW_DOWN])
def test_a_storage_that_is_away_is_told_as_transient(
    server: StorageServer, proxy: FaultProxy, url: str, fault: Fault
) -> None:
    begin(url)
    place = through(proxy, server, url)
    save_at(place, 10)
    proxy.fault = fault
    for request in (lambda: steps(place), lambda: save_at(place, 20)):
        began_s = time.monotonic()
        with pytest.raises(StorageError) as caught:
            request()
        assert caught.value.is_transient
        assert SECRET not in str(caught.value)
        assert time.monotonic() - began_s < 30.0
    # Nothing newer is skipped because the storage is away.
    with pytest.raises(StorageError):
        find_restorable(place.root, PREFIX, lambda path, reason: pytest.fail(reason))
    proxy.fault = Fault.NONE
    save_at(place, 20)
    assert steps(place) == [20, 10]


def _save_in_child(place: ObjectPlace) -> None:
    save_at(place, 20)
    os._exit(0 if steps(place) == [20, 10] else 1)


def test_a_place_works_on_in_a_forked_process(server: StorageServer, url: str) -> None:
    place = begin(url)
    save_at(place, 10)
    process = multiprocessing.get_context("fork").Process(target=_save_in_child, args=(place,))
    process.start()
    process.join(60.0)
    process.kill()
    assert process.exitcode == 0
    # Nor does that process disturb the one it comes from: their sockets are the same.
    began_s = time.monotonic()
    save_at(place, 30)
    assert time.monotonic() - began_s < READ_TIMEOUT_S / 2
    assert steps(place) == [30, 20, 10]


STOPS = [
    SavePoint.WRITING_SHARD,
    SavePoint.SHARD_PIECE,
    SavePoint.SHARD_SYNCED,
    SavePoint.PUBLISHING,
    SavePoint.PUBLISHED,
    SavePoint.RETIRING,
    SavePoint.RETIRED,
]


@pytest.mark.parametrize("point", STOPS)
def test_a_stopped_attempt_that_goes_on_publishes_and_deletes_nothing(
    server: StorageServer, url: str, point: SavePoint
) -> None:
    first = begin(url)
    for step in (1, 2, 3):
        save_at(first, step)
    with saving_process(first, 4, signal_at=(point, signal.SIGSTOP)) as stale:
        wait_until_stopped(stale)
        second = begin(url, 1)
        for step in (4, 5):
            save_at(second, step)
        before = {key: size for key, size in keys(second).items() if ".1-" in key}
        checkpoints = [path.name for path in published_paths(second.root, PREFIX)]
        assert stale.pid is not None
        os.kill(stale.pid, signal.SIGCONT)
        stale.join(60.0)
        assert stale.exitcode == 3
    assert [path.name for path in published_paths(second.root, PREFIX)] == checkpoints
    assert before.items() <= keys(second).items()
    info = find_restorable(second.root, PREFIX, lambda path, reason: pytest.fail(reason))
    assert info is not None
    assert info.step == 5
    assert ObjectStore(second.root).read(record_key(1))
    second.prune(PREFIX, KEEP_TWO)
    assert steps(second) == [5, 4]
