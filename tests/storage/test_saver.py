"""Two ranks with a writer's process each save to a real S3 server, whatever happens on the way."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from upath import UPath

from hetero_fw.checkpoint import (
    CheckpointSaver,
    ObjectPlace,
    SaveOutcome,
    TierRoot,
    WriterProcess,
    is_object_store,
    list_checkpoints,
    load_checkpoint,
    open_root,
    verify_checkpoint,
)
from hetero_fw.checkpoint.object_store import ObjectStore
from hetero_fw.checkpoint.storage import StoragePath
from hetero_fw.errors import CheckpointError
from hetero_fw.monitoring import EventName
from hetero_fw.recovery import die_with_parent
from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoint import shared_store
from tests.distributed.test_restore import find, full_tensors, laid_out, load
from tests.fault_proxy import Fault, FaultProxy
from tests.s3_server import S3Server, find_weed, login, running_server
from tests.storage.uploading import wait_for
from tests.unit.checkpoint.examples import PREFIX

pytestmark = pytest.mark.timeout(240)

TIMEOUT_S = 8.0
# A save ends before this: its timeout, a third of it for the verdict, and the clearing up.
BOUND_S = TIMEOUT_S * 1.4 + 5.0
RANKS_S = 150.0
# 40 MB for each rank: several parts of an upload.
NUM_LARGE = 20_000_000


@dataclass(frozen=True, kw_only=True)
class LoginFromFile(ObjectPlace):
    """Logs in with what is in a file at that moment, as where logins are renewed."""

    login_file: str

    @property
    def root(self) -> UPath:
        root = open_root(self.url, json.loads(Path(self.login_file).read_text()))
        assert is_object_store(root)
        return root


@dataclass(kw_only=True)
class Rank:
    """One of the ranks that save; a step of training is a sum.

    Attributes:
        proxy: the way of all ranks to the server; rank 0 has it in hand.
        place: where the test looks for what is stored, on a way of its own.
    """

    number: int
    group: dist.ProcessGroup
    proxy: FaultProxy | None
    place: ObjectPlace
    saver: CheckpointSaver
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    num_steps: int = 0

    def meet(self) -> None:
        dist.barrier(self.group)

    def save(self, step: int, tensors: dict[str, torch.Tensor]) -> SaveOutcome:
        """Save beside training, until the outcome is known."""
        began_s = time.monotonic()
        self.saver.save(step, tensors, {"step": step}, reason="test")
        assert time.monotonic() - began_s < TIMEOUT_S / 2, "training waits for the storage"
        outcomes: list[SaveOutcome] = []
        while not outcomes:
            assert time.monotonic() - began_s < BOUND_S, "the save does not end"
            float(torch.ones(1000).sum())
            self.num_steps += 1
            time.sleep(0.01)
            outcomes = self.saver.poll()
        return outcomes[0]

    def names(self) -> list[str]:
        return [name for name, _ in self.events]

    def committed(self) -> list[int]:
        return [info.step for info in list_checkpoints(self.place.root, PREFIX)]


@contextlib.contextmanager
def saving_rank(
    rank: int, group: dist.ProcessGroup, url: str, port: int, login_file: str | None = None
) -> Any:
    """This rank, with a saver whose writer reaches the server at `port` through the proxy."""
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(FaultProxy(port)) if rank == 0 else None
        endpoint: list[Any] = [proxy.endpoint if proxy else None]
        dist.broadcast_object_list(endpoint, group=group, group_src=0)
        options = login(f"http://127.0.0.1:{port}")
        way = ObjectPlace(url=url, attempt=0, options=login(endpoint[0]))
        if login_file is not None:
            way = LoginFromFile(url=url, attempt=0, login_file=login_file)
        events: list[tuple[str, dict[str, Any]]] = []
        saver = CheckpointSaver(
            place=way,
            attempt=0,
            prefix=PREFIX,
            rank=rank,
            world_size=group.size(),
            store=shared_store(rank, group),
            process_group=group,
            is_async=True,
            plan_fingerprint="plan",
            on_event=lambda name, step, fields: events.append((name, fields)),
            timeout_s=TIMEOUT_S,
            executor=WriterProcess(die_with_parent),
        )
        own = Rank(
            number=rank,
            group=group,
            proxy=proxy,
            place=ObjectPlace(url=url, attempt=0, options=options),
            saver=saver,
            events=events,
        )
        if rank == 0:
            own.place.claim()
        own.meet()
        try:
            yield own
        finally:
            saver.close(5.0)
            with contextlib.suppress(RuntimeError):
                own.meet()  # rank 0 serves the store and the proxy


def small(group: dist.ProcessGroup, step: int) -> dict[str, torch.Tensor]:
    return laid_out(full_tensors(step), group, replicated=False)


def large(group: dist.ProcessGroup, step: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (group.size(),))
    return {"w": distribute_tensor(torch.full((NUM_LARGE,), float(step)), mesh, [Shard(0)])}


def check_newest(own: Rank, step: int, tensors: dict[str, torch.Tensor]) -> None:
    """The newest checkpoint is of `step`, whole, and holds `tensors`."""
    newest = list_checkpoints(own.place.root, PREFIX)[0]
    assert newest.step == step
    if own.number == 0:
        verify_checkpoint(newest)
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assert load_checkpoint(newest.path, found, process_group=own.group) == {"step": step}
    for name, tensor in tensors.items():
        assert torch.equal(local(found[name]), local(tensor))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def root_of(own: Rank) -> StoragePath:
    return own.place.root


def save_and_restore(rank: int, group: dist.ProcessGroup, url: str, port: int) -> dict[str, Any]:
    with saving_rank(rank, group, url, port) as own:
        for step in (10, 20):
            outcome = own.save(step, small(group, step))
            assert outcome.ok, outcome.reason
        assert isinstance(outcome.path, UPath)
        rejected: list[Any] = []
        candidates = find([TierRoot(tier="storage", path=root_of(own))], group, rejected)
        loaded = load(candidates, group, replicated=False)
        assert loaded is not None
        assert not rejected
        found, filled = loaded
        return {"step": found.step, **asdict(filled)}


def test_two_ranks_save_and_read_each_byte_once(s3: S3Server, url: str) -> None:
    first, second = run_ranks(save_and_restore, 2, url, s3.port, timeout_s=RANKS_S)
    for facts in (first, second):
        assert facts["step"] == 20
        assert facts["bytes_read"] == facts["size_bytes"]
        assert len(facts["sources"]) == 1
        assert facts["sources"][0].startswith(f"{url}/{PREFIX}-step-00000020.0-")
        assert 0 < facts["own_bytes"] < facts["size_bytes"]


def restore_with_a_wrong_login(
    rank: int, group: dist.ProcessGroup, url: str, port: int
) -> dict[str, Any]:
    with saving_rank(rank, group, url, port) as own:
        for step in (10, 20):
            assert own.save(step, small(group, step)).ok
        good = login(f"http://127.0.0.1:{port}")
        root = open_root(url, good if rank == 0 else {**good, "secret": "not-the-secret"})
        began_s, rejected = time.monotonic(), list[Any]()
        candidates = find([TierRoot(tier="storage", path=root)], group, rejected)
        with pytest.raises(CheckpointError) as caught:
            load(candidates, group, replicated=False)
        return {
            "reason": str(caught.value),
            "taken_s": time.monotonic() - began_s,
            "rejected": rejected,
        }


def test_a_wrong_login_on_one_rank_restores_nothing_older(s3: S3Server, url: str) -> None:
    for facts in run_ranks(restore_with_a_wrong_login, 2, url, s3.port, timeout_s=RANKS_S):
        where = f"{url}/{PREFIX}-step-00000020.0-"
        assert facts["reason"].startswith(f"the storage denies access: {where}")
        assert facts["taken_s"] < 10.0
        assert facts["rejected"] == []


def save_with_a_wrong_login(
    rank: int, group: dist.ProcessGroup, url: str, port: int, folder: str
) -> dict[str, Any]:
    good, login_file = login(f"http://127.0.0.1:{port}"), Path(folder) / f"{rank}.json"
    login_file.write_text(json.dumps(good))
    with saving_rank(rank, group, url, port, str(login_file)) as own:
        tensors = small(group, 10)
        assert own.save(10, tensors).ok
        if rank == 1:
            login_file.write_text(json.dumps({**good, "secret": "not-the-secret"}))
        own.meet()
        began_s = time.monotonic()
        outcome = own.save(20, small(group, 20))
        failed_s = time.monotonic() - began_s
        own.meet()
        assert own.committed() == [10]
        login_file.write_text(json.dumps(good))
        own.meet()
        assert own.save(30, small(group, 30)).ok
        check_newest(own, 30, small(group, 30))
        assert own.committed() == [30, 10]
        return {
            "ok": outcome.ok,
            "reason": outcome.reason,
            "failed_s": failed_s,
            "names": own.names(),
            "num_steps": own.num_steps,
        }


def test_a_wrong_login_on_one_rank_fails_the_save_on_all(
    s3: S3Server, url: str, tmp_path: Path
) -> None:
    results = run_ranks(save_with_a_wrong_login, 2, url, s3.port, str(tmp_path), timeout_s=RANKS_S)
    for facts in results:
        assert not facts["ok"]
        assert facts["reason"].startswith("rank 1: the storage denies access: ")
        assert "signature" in facts["reason"]
        assert "not-the-secret" not in facts["reason"]
        assert "tried" not in facts["reason"]
        assert facts["failed_s"] < TIMEOUT_S
        assert facts["num_steps"] > 10
        assert EventName.WRITER_RESTART not in facts["names"]
    assert results[0]["names"].count(EventName.CHECKPOINT_FAILED) == 1


def save_through_a_hiccup(
    rank: int, group: dist.ProcessGroup, url: str, port: int, fault: str
) -> dict[str, Any]:
    with saving_rank(rank, group, url, port) as own:
        assert own.save(10, small(group, 10)).ok
        own.meet()
        before = 0
        if own.proxy is not None:
            before, own.proxy.fault = own.proxy.num_requests, Fault(fault)
            threading.Timer(2.0, setattr, (own.proxy, "fault", Fault.NONE)).start()
        own.meet()
        outcome = own.save(20, small(group, 20))
        check_newest(own, 20, small(group, 20))
        num_requests = own.proxy.num_requests - before if own.proxy is not None else 0
        return {
            "ok": outcome.ok,
            "reason": outcome.reason,
            "persist_s": outcome.persist_s,
            "num_requests": num_requests,
            "names": own.names(),
        }


@pytest.mark.parametrize("fault", [Fault.SLOW_DOWN, Fault.REFUSE])
def test_a_storage_that_is_away_for_two_seconds_costs_nothing_else(
    s3: S3Server, url: str, fault: Fault
) -> None:
    for facts in run_ranks(save_through_a_hiccup, 2, url, s3.port, fault.value, timeout_s=RANKS_S):
        assert facts["ok"], facts["reason"]
        assert 1.5 < facts["persist_s"] < TIMEOUT_S
        assert EventName.WRITER_RESTART not in facts["names"]
        assert EventName.CHECKPOINT_FAILED not in facts["names"]


def interrupted(own: Rank, step: int, interrupt: Callable[[], None]) -> SaveOutcome:
    """Save much, and have rank 0 call `interrupt` in the middle of the uploads."""
    watcher = None
    if own.proxy is not None:
        proxy = own.proxy
        proxy.sent_bytes, proxy.rate_bytes_per_s = 0, 10e6

        def watch() -> None:
            wait_for(lambda: proxy.sent_bytes > 10_000_000, "some of it is sent")
            interrupt()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
    own.meet()
    outcome = own.save(step, large(own.group, step))
    if watcher is not None and own.proxy is not None:
        watcher.join(1.0)
        assert not watcher.is_alive()
        own.proxy.rate_bytes_per_s = None
    own.meet()
    return outcome


def stored(own: Rank, step: int) -> list[str]:
    """Objects of the checkpoint of `step`."""
    return [key for key in ObjectStore(own.place.root).list() if f"step-{step:08d}" in key]


def save_while_the_server_dies(
    rank: int, group: dist.ProcessGroup, url: str, folder: str, weed: str
) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        server, port = None, [0]
        if rank == 0:
            server = stack.enter_context(running_server(Path(folder) / "server", weed))
            port = [server.port]
        dist.broadcast_object_list(port, group=group, group_src=0)
        with saving_rank(rank, group, url, port[0]) as own:
            assert own.save(10, small(group, 10)).ok
            outcome = interrupted(own, 20, lambda: server.kill() if server else None)
            if server is not None:
                server.start()
            own.meet()
            assert own.committed() == [10]
            assert not [key for key in stored(own, 20) if key.endswith("manifest.json")]
            again = own.save(30, large(group, 30))
            assert again.ok, again.reason
            check_newest(own, 30, large(group, 30))
            assert own.committed() == [30, 10]
            return {"ok": outcome.ok, "reason": outcome.reason, "names": own.names()}


def test_a_server_that_dies_in_mid_upload_leaves_the_older_checkpoint(
    s3: S3Server, url: str, tmp_path: Path
) -> None:
    weed = find_weed()
    assert weed is not None
    results = run_ranks(save_while_the_server_dies, 2, url, str(tmp_path), weed, timeout_s=RANKS_S)
    for facts in results:
        assert not facts["ok"]
        assert "rank" in facts["reason"]


def save_into_a_black_hole(
    rank: int, group: dist.ProcessGroup, url: str, port: int
) -> dict[str, Any]:
    with saving_rank(rank, group, url, port) as own:
        assert own.save(10, small(group, 10)).ok

        def fall_silent() -> None:
            assert own.proxy is not None
            own.proxy.fault = Fault.BLACK_HOLE

        began_s = time.monotonic()
        outcome = interrupted(own, 20, fall_silent)
        failed_s = time.monotonic() - began_s
        if own.proxy is not None:
            own.proxy.fault = Fault.NONE
        own.meet()
        assert own.committed() == [10]
        again = own.save(30, large(group, 30))
        assert again.ok, again.reason
        check_newest(own, 30, large(group, 30))
        return {
            "ok": outcome.ok,
            "reason": outcome.reason,
            "failed_s": failed_s,
            "events": own.events,
        }


def test_a_black_hole_costs_the_save_and_the_writer(s3: S3Server, url: str) -> None:
    for facts in run_ranks(save_into_a_black_hole, 2, url, s3.port, timeout_s=RANKS_S):
        assert not facts["ok"]
        assert "the storage did not answer in time" in facts["reason"]
        assert facts["failed_s"] < BOUND_S
        lost = [f["reason"] for name, f in facts["events"] if name == EventName.WRITER_RESTART]
        assert len(lost) == 1
        assert "hung in the storage and was killed" in lost[0]
