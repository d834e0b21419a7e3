from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_fw.checkpoint import (
    HashAlgorithm,
    Metric,
    PruneReport,
    SavePoint,
    WriterProcess,
    list_checkpoints,
    load_checkpoint,
    read_back,
    read_manifest,
    verify_checkpoint,
)
from hetero_fw.checkpoint.executor import ThreadExecutor
from hetero_fw.checkpoint.manifest import DTYPES, FileEntry
from hetero_fw.checkpoint.place import DirectoryPlace
from hetero_fw.checkpoint.read_back import NOTHING_READ, GoOn, Intact, always
from hetero_fw.checkpoint.save_tasks import OnProgress
from hetero_fw.checkpoint.shard_file import FileHash, write_shard
from hetero_fw.checkpoint.storage import StorageHangs
from hetero_fw.checkpoint.writer import TierWriter
from hetero_fw.policies import RetentionRule
from tests.unit.checkpoint.examples import (
    PREFIX,
    WAIT_S,
    Events,
    claimed,
    make_saver,
    published,
    save,
    weights,
)


@pytest.mark.parametrize("algorithm", HashAlgorithm)
def test_a_save_is_published_and_reads_back(tmp_path: Path, algorithm: HashAlgorithm) -> None:
    saver = make_saver(tmp_path, hash=algorithm)
    outcome = save(saver, 500, weights(500))
    assert outcome.ok
    assert outcome.path == tmp_path / "hetero_ckpt-step-00000500"
    assert published(tmp_path) == ["hetero_ckpt-step-00000500"]
    assert published(outcome.path) == ["manifest.json", "shard-00000.bin"]
    verify_checkpoint(outcome.path)
    loaded = {fqn: torch.zeros_like(tensor) for fqn, tensor in weights(500).items()}
    assert load_checkpoint(outcome.path, loaded) == {"step": 500}
    assert all(torch.equal(loaded[fqn], tensor) for fqn, tensor in weights(500).items())


def test_digests_are_those_that_other_programs_print(tmp_path: Path) -> None:
    for number, algorithm in enumerate((HashAlgorithm.SHA256, HashAlgorithm.BLAKE2B)):
        outcome = save(make_saver(tmp_path, attempt=number, hash=algorithm), number, weights(1))
        assert outcome.path is not None
        manifest = json.loads((outcome.path / "manifest.json").read_text())
        content = (outcome.path / "shard-00000.bin").read_bytes()
        (file,) = manifest["files"]
        assert manifest["hash"] == algorithm
        assert file[algorithm] == hashlib.new(algorithm, content).hexdigest()
        (chunk,) = manifest["tensors"]["model.weight"]["chunks"]
        part = content[chunk["byte_offset"] : chunk["byte_offset"] + chunk["length"]]
        assert chunk[algorithm] == hashlib.new(algorithm, part).hexdigest()


def test_manifest_and_outcome_agree(tmp_path: Path) -> None:
    outcome = save(make_saver(tmp_path, attempt=4), 7, weights(7))
    assert outcome.path is not None
    manifest = read_manifest(outcome.path)
    assert (manifest.step, manifest.attempt, manifest.world_size) == (7, 4, 1)
    assert (manifest.plan_fingerprint, manifest.reason) == ("plan", "test")
    assert manifest.is_finite
    assert manifest.size_bytes == outcome.size_bytes
    assert manifest.size_bytes == (outcome.path / "shard-00000.bin").stat().st_size
    assert outcome.stall_s > 0
    assert outcome.persist_s > 0


def test_events_in_order_with_their_fields(tmp_path: Path) -> None:
    events: Events = []
    outcome = save(make_saver(tmp_path, events), 3, weights(3))
    assert [(event, step) for event, step, _ in events] == [
        ("checkpoint_started", 3),
        ("checkpoint_staged", 3),
        ("checkpoint_committed", 3),
    ]
    committed = events[-1][2]
    assert committed["path"] == str(outcome.path)
    assert committed["bytes"] == outcome.size_bytes
    assert committed["reason"] == "test"
    assert committed["stall_s"] == outcome.stall_s


def test_outcomes_are_polled_once(tmp_path: Path) -> None:
    saver = make_saver(tmp_path)
    save(saver, 1, weights(1))
    save(saver, 2, weights(2))
    assert [outcome.step for outcome in saver.poll()] == [1, 2]
    assert saver.poll() == []


def test_a_blocking_save_is_over_when_it_returns(tmp_path: Path) -> None:
    saver = make_saver(tmp_path, is_async=False)
    handle = saver.save(1, weights(1), {}, reason="test")
    assert [info.step for info in list_checkpoints(tmp_path, PREFIX)] == [1]
    assert handle.wait(WAIT_S)
    assert handle.outcome is not None
    assert handle.outcome.ok
    assert handle.outcome.stall_s >= handle.outcome.persist_s
    assert not saver.is_busy()


class HeldWriter:
    """Lets a save stage, and holds its writing until `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gate = threading.Event()

        def held(*args: object) -> object:
            assert self._gate.wait(WAIT_S)
            return write_shard(*args)  # type: ignore[arg-type]

        monkeypatch.setattr("hetero_fw.checkpoint.place.write_shard", held)

    def release(self) -> None:
        self._gate.set()


def test_changing_weights_after_save_does_not_change_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldWriter(monkeypatch)
    saver = make_saver(tmp_path)
    tensors = weights(1)
    handle = saver.save(1, tensors, {}, reason="test")
    assert saver.is_busy()
    for tensor in tensors.values():
        tensor.fill_(99)
    held.release()
    assert saver.wait(WAIT_S)
    assert handle.outcome is not None
    assert handle.outcome.path is not None
    loaded = weights(0)
    load_checkpoint(handle.outcome.path, loaded)
    assert torch.equal(loaded["model.weight"], weights(1)["model.weight"])


def test_a_save_waits_for_the_one_before_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldWriter(monkeypatch)
    events: Events = []
    saver = make_saver(tmp_path, events)
    saver.save(1, weights(1), {}, reason="test")
    threading.Timer(0.2, held.release).start()
    outcome = save(saver, 2, weights(2))
    assert outcome.ok
    assert outcome.postponed_s >= 0.1
    assert outcome.stall_s < outcome.postponed_s
    staged = [fields for event, step, fields in events if (event, step) == ("checkpoint_staged", 2)]
    assert staged[0]["postponed_s"] == outcome.postponed_s
    assert [outcome.step for outcome in saver.poll()] == [1, 2]
    for step in (1, 2):
        loaded = weights(0)
        load_checkpoint(tmp_path / f"hetero_ckpt-step-{step:08d}", loaded)
        assert torch.equal(loaded["model.weight"], weights(step)["model.weight"])


def test_a_write_that_is_tried_again_counts_from_nothing(tmp_path: Path) -> None:
    shares: list[float] = []
    failures = [TimeoutError("not now")] * 2

    def on_point(point: SavePoint) -> None:
        if point is SavePoint.SHARD_PIECE:
            progress = saver.progress()
            assert progress is not None
            shares.append(progress.num_bytes / progress.size_bytes)
        if point is SavePoint.SHARD_WRITTEN and failures:
            raise failures.pop()

    saver = make_saver(tmp_path, on_point=on_point)
    assert save(saver, 1, weights(1, size=10**6)).ok
    num_pieces = len(shares) // 3
    assert num_pieces > 1
    assert shares == shares[:num_pieces] * 3
    assert shares[0] == 0.0
    assert max(shares) < 1.0


def test_storage_that_hangs_is_given_up_and_works_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldWriter(monkeypatch)
    saver = make_saver(tmp_path, timeout_s=0.3)
    first = saver.save(1, weights(1), {}, reason="test")
    second = saver.save(2, weights(2), {}, reason="test")
    assert second.wait(WAIT_S)
    assert second.outcome is not None
    assert not second.outcome.ok
    assert "the storage still holds an earlier write" in second.outcome.reason
    assert first.outcome is not None
    assert "the storage did not answer in time" in first.outcome.reason
    held.release()
    assert save(saver, 3, weights(3)).ok


def test_close_gives_up_what_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldWriter(monkeypatch)
    monkeypatch.setattr("hetero_fw.checkpoint.saver.CLOSE_GRACE_S", 0.1)
    saver = make_saver(tmp_path)
    saver.save(1, weights(1), {}, reason="test")
    assert not saver.close(0.1)
    held.release()
    assert saver.wait(WAIT_S)
    assert saver.close(WAIT_S)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("fqn", ["model.weight", "optim.weight.exp_avg"])
def test_values_that_are_not_finite_are_never_published(
    tmp_path: Path, value: float, fqn: str
) -> None:
    events: Events = []
    saver = make_saver(tmp_path, events)
    bad = weights(1)
    bad[fqn].view(-1)[-1] = value
    outcome = save(saver, 1, bad)
    assert not outcome.ok
    assert f"{fqn} is not finite" in outcome.reason
    assert events[-1][0] == "checkpoint_failed"
    assert published(tmp_path) == []
    assert save(saver, 1, weights(1)).ok


def test_infinities_in_a_buffer_can_be_allowed_but_not_nan(tmp_path: Path) -> None:
    saver = make_saver(tmp_path)
    masked = {"model.mask": torch.tensor([0.0, float("-inf")])}
    handle = saver.save(1, masked, {}, reason="test", may_be_infinite={"model.mask"})
    assert handle.wait(WAIT_S)
    assert handle.outcome is not None
    assert handle.outcome.ok
    masked["model.mask"][0] = float("nan")
    handle = saver.save(2, masked, {}, reason="test", may_be_infinite={"model.mask"})
    assert handle.wait(WAIT_S)
    assert handle.outcome is not None
    assert not handle.outcome.ok


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_kind_of_number_keeps_its_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.linspace(0, 8, 24).to(dtype).reshape(4, 6).t()  # not contiguous
    outcome = save(make_saver(tmp_path), 1, {"model.x": tensor, "model.empty": torch.empty(0, 3)})
    assert outcome.path is not None, outcome.reason
    loaded = {"model.x": torch.zeros(6, 4, dtype=dtype), "model.empty": torch.empty(0, 3)}
    load_checkpoint(outcome.path, loaded)
    expected = tensor.contiguous().view(torch.uint8)
    assert torch.equal(loaded["model.x"].contiguous().view(torch.uint8), expected)


def test_an_infinite_eight_bit_value_is_found(tmp_path: Path) -> None:
    tensor = torch.tensor([1.0, float("nan")]).to(torch.float8_e5m2)
    assert not save(make_saver(tmp_path), 1, {"model.x": tensor}).ok


def test_state_that_is_no_json_fails_the_save_not_the_training(tmp_path: Path) -> None:
    saver = make_saver(tmp_path)
    handle = saver.save(1, weights(1), {"best": torch.tensor(1.0)}, reason="test")
    assert handle.wait(WAIT_S)
    assert handle.outcome is not None
    assert not handle.outcome.ok
    assert "JSON" in handle.outcome.reason


def test_what_is_no_tensor_is_named(tmp_path: Path) -> None:
    outcome = save(make_saver(tmp_path), 1, {"model.x": 3})  # type: ignore[dict-item]
    assert not outcome.ok
    assert "not tensors: model.x" in outcome.reason


def test_the_state_is_that_of_the_moment_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldWriter(monkeypatch)
    saver = make_saver(tmp_path)
    state = {"position": [1, 2]}
    handle = saver.save(1, weights(1), state, reason="test")
    state["position"].append(3)
    held.release()
    assert handle.wait(WAIT_S)
    assert read_manifest(tmp_path / "hetero_ckpt-step-00000001").state == {"position": [1, 2]}


def test_storage_that_is_gone_fails_the_save_and_the_next_one_works(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    saver = make_saver(root)
    assert save(saver, 1, weights(1)).ok
    shutil.move(root, tmp_path / "away")
    root.write_text("in the way")
    outcome = save(saver, 2, weights(2))
    assert not outcome.ok
    assert str(root) in outcome.reason
    root.unlink()
    shutil.move(tmp_path / "away", root)
    assert save(saver, 2, weights(2)).ok
    assert [info.step for info in list_checkpoints(root, PREFIX)] == [2, 1]


def test_a_failed_publish_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = make_saver(tmp_path)
    assert save(saver, 1, weights(1)).ok
    real = os.fsync

    def failing(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == tmp_path.stat().st_ino:
            raise OSError(5, "Input/output error")
        real(descriptor)

    with monkeypatch.context() as context:
        context.setattr(os, "fsync", failing)
        assert not save(saver, 1, weights(2)).ok
        assert not save(saver, 2, weights(2)).ok
    assert published(tmp_path) == ["hetero_ckpt-step-00000001"]
    loaded = weights(0)
    load_checkpoint(tmp_path / "hetero_ckpt-step-00000001", loaded)
    assert torch.equal(loaded["model.weight"], weights(1)["model.weight"])


def test_a_log_that_fails_loses_no_checkpoint(tmp_path: Path) -> None:
    saver = make_saver(tmp_path, events=())  # type: ignore[arg-type]  # refuses append
    assert save(saver, 1, weights(1)).ok


def test_a_new_structure_is_planned_anew(tmp_path: Path) -> None:
    saver = make_saver(tmp_path)
    assert save(saver, 1, weights(1)).ok
    assert save(saver, 2, {**weights(2), "model.more": torch.ones(9)}).ok
    assert save(saver, 3, weights(3, size=4)).ok
    for info in list_checkpoints(tmp_path, PREFIX):
        verify_checkpoint(info)


def test_old_checkpoints_are_pruned_after_the_commit(tmp_path: Path) -> None:
    events: Events = []
    saver = make_saver(tmp_path, events, retention=RetentionRule(keep_latest_k=2))
    for step in range(1, 6):
        assert save(saver, step, weights(step)).ok
    assert published(tmp_path) == ["hetero_ckpt-step-00000004", "hetero_ckpt-step-00000005"]
    gone = [(step, fields) for name, step, fields in events if name == "checkpoint_deleted"]
    assert [step for step, _ in gone] == [1, 2, 3]
    assert gone[0][1]["path"] == str(tmp_path / "hetero_ckpt-step-00000001")
    assert "keep" in gone[0][1]["reason"]


@pytest.mark.parametrize("value", [0.25, float("nan")])
def test_the_metric_is_kept_with_the_checkpoint(tmp_path: Path, value: float) -> None:
    saver = make_saver(tmp_path)
    metric = Metric(name="val_loss", value=value)
    handle = saver.save(1, weights(1), {}, reason="test", metric=metric)
    assert handle.wait(WAIT_S)
    (info,) = list_checkpoints(tmp_path, PREFIX)
    assert info.metric == (metric if value == 0.25 else None)


def test_the_best_checkpoint_stays(tmp_path: Path) -> None:
    rule = RetentionRule(keep_latest_k=2, monitor="val_loss", keep_every_n_steps=5)
    saver = make_saver(tmp_path, retention=rule)
    for step, value in enumerate([3.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], start=1):
        metric = Metric(name="val_loss", value=value)
        assert saver.save(step, weights(step), {}, reason="test", metric=metric).wait(WAIT_S)
    assert [info.step for info in list_checkpoints(tmp_path, PREFIX)] == [8, 7, 5, 2]


def test_every_point_is_passed_in_order(tmp_path: Path) -> None:
    passed: list[SavePoint] = []
    rule = RetentionRule(keep_latest_k=2)
    saver = make_saver(tmp_path, retention=rule, on_point=passed.append)
    for step in (1, 2, 3):
        passed.clear()
        assert save(saver, step, weights(step)).ok
    assert passed == [point for point in SavePoint if point is not SavePoint.SET_ASIDE]
    passed.clear()
    assert save(saver, 3, weights(3)).ok
    assert SavePoint.SET_ASIDE in passed


def test_staging_reuses_its_buffer(tmp_path: Path) -> None:
    saver = make_saver(tmp_path)
    addresses = set()
    for step in range(3):
        save(saver, step, weights(step))
        assert saver._stager._buffer.memory is not None
        addresses.add(saver._stager._buffer.memory.tensor.data_ptr())
    assert len(addresses) == 1


class SlowReading:
    """Reads a file back in 0.6 s, a piece every 0.1 s; holds each piece until `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_held: bool = False) -> None:
        self.files: list[Path] = []
        self._pieces: dict[Path, int] = {}
        self._gate = threading.Event()
        if not is_held:
            self.release()
        self._read = read_back.verify_further
        monkeypatch.setattr(read_back, "verify_further", self)

    def release(self) -> None:
        self._gate.set()

    def __call__(self, found: FileHash, file: FileEntry, go_on: GoOn) -> bool:
        path = found.path
        assert isinstance(path, Path)
        if path not in self._pieces:
            self.files.append(path)
        while self._pieces.setdefault(path, 0) < 6:
            time.sleep(0.1)
            self._pieces[path] += self._gate.is_set()
            if not go_on():
                return False
        return self._read(found, file)


def test_old_checkpoints_go_where_reading_one_takes_longer_than_a_save_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = SlowReading(monkeypatch)
    saver = make_saver(tmp_path, timeout_s=0.4, retention=RetentionRule(keep_latest_k=2))
    for step in range(1, 12):
        assert save(saver, step, weights(step)).ok
        assert len(published(tmp_path)) <= 8
    assert published(tmp_path)[-2:] == [f"hetero_ckpt-step-{step:08}" for step in (10, 11)]
    assert len(slow.files) >= 3
    assert not caplog.records


@pytest.mark.parametrize("is_async", [True, False])
def test_a_save_does_not_wait_until_old_checkpoints_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    slow = SlowReading(monkeypatch, is_held=True)
    saver = make_saver(tmp_path, is_async=is_async, retention=RetentionRule(keep_latest_k=2))
    try:
        handles = []
        for step in range(1, 8):
            handles.append(saver.save(step, weights(step), {}, reason="test"))
            assert saver.wait_for_verdicts(5.0), "its verdict is known although another is read"
            assert not saver.is_busy()
        assert [outcome.ok for outcome in saver.poll()] == [True] * 7
        assert len(published(tmp_path)) == 7
        assert len(slow.files) == 1
        slow.release()
        assert all(handle.wait(WAIT_S) for handle in handles)
        assert [name[-1] for name in published(tmp_path)] == ["6", "7"]
        assert len(slow.files) == len(set(slow.files))
    finally:
        slow.release()
        saver.close(5.0)


@dataclass(frozen=True, kw_only=True)
class EndlessPlace(DirectoryPlace):
    """Takes for ever to read checkpoints back."""

    def prune(
        self,
        prefix: str,
        rule: RetentionRule,
        *,
        intact: Intact = NOTHING_READ,
        go_on: GoOn = always,
        **options: Any,
    ) -> PruneReport:
        while go_on():
            time.sleep(0.02)
        return PruneReport(intact=intact, reason="", is_complete=False)


def test_a_save_comes_in_between_where_a_process_reads_old_checkpoints(tmp_path: Path) -> None:
    place = EndlessPlace(directories=claimed(tmp_path, 1))
    rule = RetentionRule(keep_latest_k=2)
    saver = make_saver(tmp_path, place=place, retention=rule, executor=WriterProcess())
    try:
        for step in range(1, 5):
            saver.save(step, weights(step), {}, reason="test")
            assert saver.wait_for_verdicts(5.0)
            assert not saver.is_busy()
        assert [outcome.ok for outcome in saver.poll()] == [True] * 4
        assert not saver.wait(0.0)
    finally:
        assert not saver.close(0.1)


def test_what_is_read_back_can_be_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SlowReading(monkeypatch, is_held=True)
    saver = make_saver(tmp_path, retention=RetentionRule(keep_latest_k=2))
    for step in range(1, 4):
        saver.save(step, weights(step), {}, reason="test")
        assert saver.wait_for_verdicts(5.0)
    began_s = time.monotonic()
    assert not saver.close(0.1)
    assert time.monotonic() - began_s < 5.0
    assert len(published(tmp_path)) == 3


def test_a_save_frees_its_memory_before_old_checkpoints_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = make_saver(tmp_path, retention=RetentionRule(keep_latest_k=2))
    was_free: list[bool] = []
    read = read_back.verify_further

    def look(*arguments: Any) -> bool:
        was_free.append(saver._stager._is_free.is_set())
        return read(*arguments)

    monkeypatch.setattr(read_back, "verify_further", look)
    for step in (1, 2, 3):
        assert save(saver, step, weights(step)).ok
    assert was_free
    assert all(was_free)


def test_a_save_whose_writer_breaks_does_not_stay_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: Events = []
    saver = make_saver(tmp_path, events)

    def run(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(TierWriter, "run", run)
        outcome = save(saver, 1, weights(1))
    assert not outcome.ok
    assert 'it ended early: RuntimeError("can\'t start new thread")' in outcome.reason
    (failed,) = [fields for name, _, fields in events if name == "checkpoint_failed"]
    assert failed["reason"] == outcome.reason
    assert not saver.is_busy()
    assert save(saver, 2, weights(2)).ok


def test_threads_take_turns_at_the_storage() -> None:
    executor = ThreadExecutor()
    at_work: list[int] = []
    most: list[int] = []

    def task(content: memoryview, on_progress: OnProgress) -> None:
        at_work.append(1)
        most.append(len(at_work))
        time.sleep(0.05)
        at_work.pop()

    def run() -> None:
        executor.run(task, deadline_s=time.monotonic() + WAIT_S)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4

    held = threading.Event()

    def hold(content: memoryview, on_progress: OnProgress) -> None:
        held.wait(WAIT_S)

    holder = threading.Thread(
        target=lambda: executor.run(hold, deadline_s=time.monotonic() + WAIT_S)
    )
    holder.start()
    time.sleep(0.05)
    with pytest.raises(StorageHangs, match="still holds an earlier task"):
        executor.run(task, deadline_s=time.monotonic() + 0.1)
    held.set()
    holder.join()


def test_a_failed_save_is_told_before_its_verdict(tmp_path: Path) -> None:
    events: Events = []
    saver = make_saver(tmp_path, events)
    shutil.rmtree(claimed(tmp_path).staging)
    handle = saver.save(1, weights(1), {}, reason="test")
    assert handle.wait_for_verdict(WAIT_S)
    assert [name for name, _, _ in events if name == "checkpoint_failed"]
