"""Restoring from real servers that do not answer, or give what was not written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hetero_fw.checkpoint import (
    Filled,
    FoundCheckpoint,
    ObjectPlace,
    Ranks,
    Rejection,
    TierRoot,
    fill_from,
    find_candidates,
    load_checkpoint,
    load_newest,
    open_root,
)
from hetero_fw.checkpoint.manifest import MANIFEST_NAME
from hetero_fw.checkpoint.object_store import ObjectStore
from hetero_fw.checkpoint.object_versions import newest_attempt
from hetero_fw.errors import CheckpointError
from tests.fault_proxy import Fault, FaultProxy
from tests.s3_server import SECRET
from tests.storage.uploading import BIG, wait_for
from tests.storage_server import StorageServer
from tests.unit.checkpoint.examples import PREFIX, weights
from tests.unit.checkpoint.object_saves import save_at

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.parametrize("server", ["s3", "gs"], indirect=True),
]

PATIENCE_S = 6.0


@dataclass(frozen=True, kw_only=True)
class Loaded:
    step: int
    path: str
    filled: Filled


def load(
    root: Any, rejected: list[Rejection] | None = None, *, patience_s: float = PATIENCE_S
) -> Loaded | None:
    """The newest checkpoint that fills tensors of its own sizes."""

    def fill(found: FoundCheckpoint) -> Filled:
        entries = found.manifest.tensors.items()
        return fill_from(
            found,
            {name: torch.zeros(entry.size, dtype=entry.torch_dtype) for name, entry in entries},
        )

    candidates = find_candidates(
        Ranks(None),
        [TierRoot(tier="storage", path=root)],
        PREFIX,
        refuse=lambda manifest: None,
        on_rejected=(rejected if rejected is not None else []).append,
        patience_s=patience_s,
    )
    loaded = load_newest(candidates, fill)
    if loaded is None:
        return None
    found, filled = loaded
    return Loaded(step=found.step, path=found.path, filled=filled)


def begun(url: str) -> ObjectPlace:
    place = ObjectPlace(url=url, attempt=0)
    place.claim()
    return place


def through(proxy: FaultProxy, server: StorageServer, url: str, **options: Any) -> Any:
    return open_root(url, {**server.options(proxy.endpoint), **options})


def key_of(place: ObjectPlace, step: int, name: str) -> str:
    (key,) = [k for k in ObjectStore(place.root).list() if f"-{step:08d}." in k and name in k]
    return key


@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.SLOW_DOWN])
def test_a_hiccup_is_bridged(
    server: StorageServer, proxy: FaultProxy, url: str, fault: Fault
) -> None:
    place = begun(url)
    save_at(place, 10)
    save_at(place, 20)
    proxy.fault = fault
    threading.Timer(2.0, setattr, (proxy, "fault", Fault.NONE)).start()
    rejected: list[Rejection] = []
    loaded = load(through(proxy, server, url), rejected)
    assert loaded is not None
    assert (loaded.step, rejected) == (20, [])


def test_an_attempt_begins_in_spite_of_a_hiccup(
    server: StorageServer, proxy: FaultProxy, url: str
) -> None:
    save_at(begun(url), 10)
    proxy.fault = Fault.REFUSE
    threading.Timer(2.0, setattr, (proxy, "fault", Fault.NONE)).start()
    second = ObjectPlace(url=url, attempt=1, options=server.options(proxy.endpoint))
    second.claim()
    assert newest_attempt(ObjectStore(second.root)) == 1
    loaded = load(second.root)
    assert loaded is not None
    assert loaded.step == 10


@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.SLOW_DOWN])
def test_a_storage_that_stays_away_is_no_fresh_start(
    server: StorageServer, proxy: FaultProxy, url: str, fault: Fault
) -> None:
    save_at(begun(url), 10)
    proxy.fault = fault
    began_s = time.monotonic()
    with pytest.raises(CheckpointError, match="the storage does not answer properly") as caught:
        load(through(proxy, server, url), patience_s=2.0)
    assert time.monotonic() - began_s < 30.0
    assert url in str(caught.value)
    assert SECRET not in str(caught.value)


# Where the way breaks: how often the client has asked before. Its first question is for a listing.
RECORD, MANIFEST, SIZES, BYTES = 1, 2, 3, 4


class BreaksAfter:
    """Breaks the way once the client has asked the storage so many times."""

    def __init__(self, root: Any, proxy: FaultProxy, num_calls: int, fault: Fault) -> None:
        self._left = num_calls
        self._proxy = proxy
        self._fault = fault
        self.broken = threading.Event()
        for name in ("find", "cat_file", "cat_ranges"):
            setattr(root.fs, name, self._counting(getattr(root.fs, name)))

    def _counting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left < 0 and not self.broken.is_set():
                self._proxy.fault = self._fault
                self.broken.set()
            return method(*args, **options)

        return counted


@pytest.mark.parametrize("num_calls", [RECORD, MANIFEST, SIZES, BYTES])
@pytest.mark.parametrize("fault", [Fault.SLOW_DOWN, Fault.REFUSE])
def test_nothing_older_is_taken_because_the_storage_goes_away(
    server: StorageServer,
    proxy: FaultProxy,
    url: str,
    num_calls: int,
    fault: Fault,
) -> None:
    place = begun(url)
    save_at(place, 10)
    save_at(place, 20)
    root = through(proxy, server, url, skip_instance_cache=True)
    way = BreaksAfter(root, proxy, num_calls, fault)
    rejected: list[Rejection] = []
    began_s = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        load(root, rejected, patience_s=2.0)
    assert way.broken.is_set()
    assert time.monotonic() - began_s < 60.0
    where = url if num_calls == RECORD else f"{url}/{PREFIX}-step-00000020.0-"
    assert str(caught.value).startswith(f"the storage does not answer properly: {where}")
    assert rejected == []
    proxy.fault = Fault.NONE
    loaded = load(through(proxy, server, url))
    assert loaded is not None
    assert loaded.step == 20


def test_bytes_that_do_not_come_end_the_wait(
    server: StorageServer,
    proxy: FaultProxy,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = begun(url)
    save_at(place, 10)
    save_at(place, 20, size=BIG // 10)
    for module in ("storage", "object_store"):
        monkeypatch.setattr(f"hetero_fw.checkpoint.{module}.REQUEST_TIMEOUT_S", 1.0)
    monkeypatch.setattr("hetero_fw.checkpoint.storage.SLOWEST_BYTES_PER_S", 1e8)
    root = through(proxy, server, url, skip_instance_cache=True)
    BreaksAfter(root, proxy, BYTES, Fault.BLACK_HOLE)
    rejected: list[Rejection] = []
    began_s = time.monotonic()
    with pytest.raises(CheckpointError, match="no answer in time"):
        load(root, rejected, patience_s=2.0)
    assert time.monotonic() - began_s < 15.0
    assert rejected == []


def test_damaged_bytes_lead_to_the_version_before(server: StorageServer, url: str) -> None:
    place = begun(url)
    save_at(place, 10)
    save_at(place, 20, value=21)
    time.sleep(1.1)  # the store's clock counts seconds
    save_at(place, 20, value=22)
    store = ObjectStore(place.root)
    newest, older = sorted(
        (k for k in store.list() if "-00000020." in k and k.endswith(".bin")),
        key=lambda key: store.list()[key].modified,
        reverse=True,
    )
    content = bytearray(store.read(newest))
    content[len(content) // 2] ^= 1
    store.put(newest, bytes(content))
    rejected: list[Rejection] = []
    loaded = load(place.root, rejected)
    assert loaded is not None
    assert (loaded.step, loaded.path) == (20, f"{url}/{older.partition('/')[0]}")
    (rejection,) = rejected
    assert (rejection.step, rejection.path) == (20, f"{url}/{newest.partition('/')[0]}")
    assert f"{newest}: bytes" in rejection.reason
    # And on to the older step, when that is damaged as well.
    store.put(older, store.read(older)[:-1])
    store.delete([newest])
    rejected.clear()
    loaded = load(place.root, rejected)
    assert loaded is not None
    assert loaded.step == 10
    assert [rejection.step for rejection in rejected] == [20, 20]
    reasons = "; ".join(rejection.reason for rejection in rejected)
    assert f"{newest}: is missing" in reasons
    assert "were written" in reasons


def test_a_damaged_manifest_leads_to_the_step_before(server: StorageServer, url: str) -> None:
    place = begun(url)
    save_at(place, 10)
    save_at(place, 20)
    store, key = ObjectStore(place.root), key_of(place, 20, MANIFEST_NAME)
    store.put(key, store.read(key).replace(b'"step": 20', b'"step": 21'))
    rejected: list[Rejection] = []
    loaded = load(place.root, rejected)
    assert loaded is not None
    assert loaded.step == 10
    assert [(item.step, f"{url}/{key}" in item.reason) for item in rejected] == [(20, True)]


def test_large_tensors_come_in_ranges_side_by_side(
    server: StorageServer, proxy: FaultProxy, url: str
) -> None:
    place = begun(url)
    save_at(place, 10, size=BIG)
    root = through(proxy, server, url, skip_instance_cache=True)
    most: list[int] = []
    inner = root.fs.cat_ranges

    def cat_ranges(paths: list[str], starts: list[int], ends: list[int], **options: Any) -> Any:
        most.append(sum(ends) - sum(starts))
        return inner(paths, starts, ends, **options)

    root.fs.cat_ranges = cat_ranges
    loaded = load(root)
    assert loaded is not None
    assert (
        loaded.filled.bytes_read
        == loaded.filled.size_bytes
        == sum(t.nbytes for t in weights(10, BIG).values())
    )
    assert len(most) > 2
    assert max(most) <= 32 * 2**20
    (path,) = [root / name for name in {key.partition("/")[0] for key in _checkpoint_keys(place)}]
    tensors = {"model.weight": torch.zeros(BIG, 3)}
    assert load_checkpoint(path, tensors) == {"step": 10}
    assert bool((tensors["model.weight"] == 10.0).all())
    wait_for(lambda: proxy.num_requests > 8, "it went through the proxy")


def _checkpoint_keys(place: ObjectPlace) -> list[str]:
    return [key for key in ObjectStore(place.root).list() if key.startswith(PREFIX)]
