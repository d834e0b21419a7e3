"""A node that is lost with all it held costs the steps since the last save to the nodes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import TrainRun
from tests.recovery.runs import faulty
from tests.recovery.test_kill import TINY, Start, digest_of, rank_pid

# Every fourth step to the nodes; to the storage only what the end of the run brings.
NODES = (*TINY, "ckpt.interval_steps=4", "ckpt.tiers.storage_interval_steps=1000")
KILLED_AFTER = 8


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Start], str]:
    digests: list[str] = []

    def digest(start_train: Start) -> str:
        if not digests:
            run = start_train(*TINY, "run_name=undisturbed").wait()
            assert run.returncode == 0, run.output
            digests.append(digest_of(run.run_dir.parent / "undisturbed"))
        return digests[0]

    return digest


def committed(run: TrainRun, tier: str) -> list[int]:
    return [e["step"] for e in run.events("checkpoint_committed") if e["tier"] == tier]


def kill_node(run: TrainRun, ranks: tuple[int, ...]) -> None:
    for rank in ranks:
        os.kill(rank_pid(run, rank), signal.SIGKILL)


def start_on_nodes(start_train: Start, tmp_path: Path) -> TrainRun:
    run = start_train(*NODES, f"ckpt.tiers.local={tmp_path}/nodes")
    run.wait_until(lambda: max(committed(run, "local"), default=0) >= KILLED_AFTER)
    return run


def test_a_node_that_is_lost_with_its_disk_is_replaced_by_its_copies(
    start_train: Start, tmp_path: Path, undisturbed: Callable[[Start], str]
) -> None:
    run = start_on_nodes(start_train, tmp_path)
    kill_node(run, (2, 3))
    shutil.rmtree(tmp_path / "nodes/run/v100-0")
    run.wait()
    assert run.returncode == 0, run.output
    (restored,) = run.events("restored")
    assert restored["step"] >= KILLED_AFTER
    assert restored["tiers"] == ["local"]
    assert "/nodes/run/a100-0/" in restored["source"]
    assert str(run.run_dir) not in restored["source"]
    assert restored["bytes_read"] == restored["size_bytes"]
    assert committed(run, "storage") == [24]
    # The room on the nodes is given back once the storage has the last step.
    assert list((tmp_path / "nodes").iterdir()) == []
    assert digest_of(run.run_dir) == undisturbed(start_train)


@contextmanager
def between_attempts(start_train: Start, tmp_path: Path) -> Iterator[TrainRun]:
    """All ranks are killed, and the next attempt begins when the block ends, and the run ends."""
    run = start_on_nodes(start_train, tmp_path)
    # Stopped, the supervisor does not start it before.
    os.kill(run.process.pid, signal.SIGSTOP)
    kill_node(run, (0, 1, 2, 3))
    yield run
    os.kill(run.process.pid, signal.SIGCONT)
    run.wait()
    assert run.returncode == 0, run.output


def damage(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 0x10
    shard.write_bytes(content)


def test_of_two_copies_the_good_one_is_used(
    start_train: Start, tmp_path: Path, undisturbed: Callable[[Start], str]
) -> None:
    with between_attempts(start_train, tmp_path) as run:
        newest = max((tmp_path / "nodes/run/a100-0").glob("hetero_ckpt-step-*"))
        shard = newest / "shard-00001.bin"
        damage(shard)
    (restored,) = run.events("restored")
    assert restored["step"] == int(newest.name[-8:])
    assert restored["tiers"] == ["local"]
    (rejected,) = run.events("checkpoint_rejected")
    assert rejected["path"] == str(newest)
    assert str(shard) in rejected["reason"]
    assert digest_of(run.run_dir) == undisturbed(start_train)


def test_where_all_copies_are_damaged_the_attempt_goes_on_from_the_older_ones(
    start_train: Start, tmp_path: Path, undisturbed: Callable[[Start], str]
) -> None:
    with between_attempts(start_train, tmp_path) as run:
        copies = list((tmp_path / "nodes/run").glob("*/hetero_ckpt-step-*"))
        newest = max(path.name for path in copies)
        damaged = [path for path in copies if path.name == newest]
        for path in damaged:
            damage(path / "shard-00001.bin")
    (restored,) = run.events("restored")
    assert restored["step"] == max(int(p.name[-8:]) for p in copies if p.name != newest)
    rejected = {event["path"] for event in run.events("checkpoint_rejected")}
    assert rejected == {str(path) for path in damaged}
    assert {event["attempt"] for event in run.events("attempt_start")} == {0, 1}
    # What was built for the second try saves to the nodes and to the storage.
    assert max(committed(run, "local")) > int(newest[-8:])
    assert committed(run, "storage") == [24]
    assert digest_of(run.run_dir) == undisturbed(start_train)


def test_without_any_node_the_storage_serves(
    start_train: Start, tmp_path: Path, undisturbed: Callable[[Start], str]
) -> None:
    settings = (*NODES, f"ckpt.tiers.local={tmp_path}/nodes", "ckpt.tiers.storage_interval_steps=8")
    run = start_train(*settings)
    run.wait_until(lambda: bool(committed(run, "storage")))
    os.kill(run.process.pid, signal.SIGSTOP)
    kill_node(run, (0, 1, 2, 3))
    shutil.rmtree(tmp_path / "nodes/run")
    stored = max(int(path.name[-8:]) for path in (run.run_dir / "checkpoints").glob("hetero*"))
    os.kill(run.process.pid, signal.SIGCONT)
    run.wait()
    assert run.returncode == 0, run.output
    (restored,) = run.events("restored")
    assert restored["step"] == stored
    assert restored["tiers"] == ["storage"]
    assert digest_of(run.run_dir) == undisturbed(start_train)
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["status"] == "DONE"


def test_a_node_directory_that_cannot_be_used_is_done_without(
    start_train: Start, tmp_path: Path, undisturbed: Callable[[Start], str]
) -> None:
    settings = (*NODES, f"ckpt.tiers.local={tmp_path}/nodes", "ckpt.tiers.storage_interval_steps=4")
    run = start_train(*settings)
    run.wait_until(lambda: bool(committed(run, "storage")))
    os.kill(run.process.pid, signal.SIGSTOP)
    kill_node(run, (2, 3))
    shutil.rmtree(tmp_path / "nodes/run/v100-0")
    (tmp_path / "nodes/run/v100-0").touch()  # a file in the way: no directory can be made there
    num_local = len(committed(run, "local"))
    os.kill(run.process.pid, signal.SIGCONT)
    run.wait()
    assert run.returncode == 0, run.output
    assert "this attempt saves to no node directory" in run.output
    assert len(run.events("restart")) == 1
    assert len(committed(run, "local")) == num_local
    assert committed(run, "storage")[-1] == 24
    assert digest_of(run.run_dir) == undisturbed(start_train)


def test_a_last_step_that_the_storage_lacks_is_brought_there_by_the_same_command(
    start_train: Start, tmp_path: Path
) -> None:
    command = (
        *NODES,
        f"ckpt.tiers.local={tmp_path}/nodes",
        "ckpt.tiers.storage_interval_steps=8",
        "ckpt.monitor=loss",
    )
    run = start_train(*command)
    run.wait_until(lambda: bool(committed(run, "storage")))
    shutil.rmtree(run.run_dir / "checkpoints")
    (run.run_dir / "checkpoints").touch()  # a file in the way: it cannot be made again
    run.wait()
    assert run.returncode == 0, run.output
    assert "Warning: the storage has no checkpoint of step 24, its newest is that of" in run.output
    assert f"{tmp_path}/nodes holds one of step 24. The same command brings it there" in run.output
    assert "the place of the checkpoints is gone" in run.output
    last = tmp_path / "nodes/run/a100-0/hetero_ckpt-step-00000024/manifest.json"
    metric = json.loads(last.read_text())["metric"]
    digest, steps = digest_of(run.run_dir), (run.run_dir / "metrics.csv").read_text()

    (run.run_dir / "checkpoints").unlink()
    again = start_train(*command).wait()
    assert again.returncode == 0, again.output
    assert "DONE after step 24, which the storage lacks" in again.output
    (restored,) = again.events("restored")
    assert (restored["step"], restored["tiers"]) == (24, ["local"])
    saved = [e for e in again.events("checkpoint_committed") if e["attempt"] == 1]
    assert [(event["step"], event["tier"]) for event in saved] == [(24, "storage")]
    stored = run.run_dir / "checkpoints/hetero_ckpt-step-00000024/manifest.json"
    assert json.loads(stored.read_text())["metric"] == metric is not None
    assert (run.run_dir / "metrics.csv").read_text() == steps
    assert digest_of(run.run_dir) == digest
    assert list((tmp_path / "nodes").iterdir()) == []
    assert "asks for no more" in start_train(*command).wait().output


def test_after_an_exception_the_nodes_have_the_step_it_came_after(
    start_train: Start, tmp_path: Path, undisturbed: Callable[[Start], str]
) -> None:
    run = start_train(
        *TINY,
        *faulty(fail_rank=2, fail_step=8, marker=tmp_path / "failed"),
        "ckpt.interval_steps=20",
        f"ckpt.tiers.local={tmp_path}/nodes",
        "ckpt.tiers.storage_interval_steps=1000",
    ).wait()
    assert run.returncode == 0, run.output
    (restored,) = run.events("restored")
    assert (restored["step"], restored["tiers"]) == (7, ["local"])
    assert committed(run, "storage") == [24]
    assert digest_of(run.run_dir) == undisturbed(start_train)
