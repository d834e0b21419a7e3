"""Runs that keep their checkpoints on S3: killed, and continued from there alone."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero_fw.checkpoint import list_checkpoints, open_root, read_quarantine
from tests.conftest import TrainRun
from tests.fault_proxy import Fault, FaultProxy
from tests.recovery.runs import NO_LAST_SAVE, PAIR, digest_of, undisturbed
from tests.recovery.test_kill import rank_pid, steps_done
from tests.s3_server import S3Server
from tests.storage_server import StorageServer
from tests.unit.checkpoint.examples import PREFIX

Start = Callable[..., TrainRun]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def plain_digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the weights after a run that nobody touched, which knew of no S3."""
    return digest_of(undisturbed(tmp_path_factory.mktemp("plain"), *PAIR))


def empty(run_dir: Path) -> None:
    """Leave the directory, and nothing in it."""
    shutil.rmtree(run_dir)
    run_dir.mkdir()


@pytest.mark.parametrize("server", ["s3", "gs"], indirect=True)
def test_a_killed_rank_is_restored_from_the_storage(
    start_train: Start, server: StorageServer, url: str, plain_digest: str
) -> None:
    command = (*PAIR, f"ckpt.storage={url}")
    run = start_train(*command)
    run.wait_until(lambda: run.events("checkpoint_committed") and steps_done(run) >= 8)
    os.kill(rank_pid(run, 1), signal.SIGKILL)
    run.wait()
    assert run.returncode == 0, run.output
    assert digest_of(run.run_dir) == plain_digest
    (restored,) = run.events("restored")
    assert restored["step"] in {6, 12, 18}
    assert restored["source"].startswith(f"{url}/run/{PREFIX}-step-{restored['step']:08d}.0-")
    assert restored["bytes_read"] == restored["size_bytes"]
    assert restored["tiers"] == ["storage"]
    assert f"continuing from {PREFIX}-step-{restored['step']:08d}.0-" in run.output
    assert not run.events("checkpoint_rejected")
    assert not (run.run_dir / "checkpoints").exists()
    assert list_checkpoints(open_root(f"{url}/run"), PREFIX)[0].step == 24
    # What the run directory knew is lost, and the storage knows that it is at its end.
    empty(run.run_dir)
    again = start_train(*command).wait()
    assert again.returncode == 0, again.output
    assert [event["step"] for event in again.events("restored")] == [24]
    assert digest_of(run.run_dir) == plain_digest


def test_a_restart_waits_for_an_s3_that_is_away(
    start_train: Start, s3: S3Server, proxy: FaultProxy, url: str, plain_digest: str
) -> None:
    run = start_train(*PAIR, f"ckpt.storage={url}", env={"AWS_ENDPOINT_URL": proxy.endpoint})
    run.wait_until(lambda: run.events("checkpoint_committed") and steps_done(run) >= 8)
    proxy.fault = Fault.REFUSE
    os.kill(rank_pid(run, 0), signal.SIGKILL)
    run.wait_until(lambda: [e for e in run.events("attempt_start") if e["attempt"] == 1])
    time.sleep(4.0)
    assert not run.events("restored")
    proxy.fault = Fault.NONE
    run.wait()
    assert run.returncode == 0, run.output
    # It costs no attempt, and not a step more than the failure alone.
    assert {event["attempt"] for event in run.events("attempt_start")} == {0, 1}
    assert [event["step"] for event in run.events("restored")] == [
        max(e["step"] for e in run.events("checkpoint_committed") if e["attempt"] == 0)
    ]
    assert digest_of(run.run_dir) == plain_digest


def test_a_run_whose_directory_is_lost_continues_from_s3(
    start_train: Start, s3: S3Server, url: str, plain_digest: str
) -> None:
    command = (*PAIR, f"ckpt.storage={url}")
    first = start_train(*command)
    first.wait_until(lambda: len(first.events("checkpoint_committed")) >= 2)
    first.kill()
    empty(first.run_dir)
    second = start_train(*command).wait()
    assert second.returncode == 0, second.output
    assert second.events("restored")[0]["step"] >= 12
    assert {event["attempt"] for event in second.events("restored")} == {1}
    assert digest_of(second.run_dir) == plain_digest


def test_s3_stands_in_for_the_directories_of_lost_nodes(
    start_train: Start, s3: S3Server, url: str, plain_digest: str, tmp_path: Path
) -> None:
    command = (*PAIR, f"ckpt.storage={url}", f"ckpt.tiers.local={tmp_path / 'nodes'}")
    run = start_train(*command)
    run.wait_until(lambda: "storage" in [e["tier"] for e in run.events("checkpoint_committed")])
    run.kill()
    shutil.rmtree(tmp_path / "nodes")
    run = start_train(*command).wait()
    assert run.returncode == 0, run.output
    (restored,) = run.events("restored")
    assert restored["tiers"] == ["storage"]
    assert restored["source"].startswith(f"{url}/run/{PREFIX}-step-")
    assert digest_of(run.run_dir) == plain_digest
    assert list_checkpoints(open_root(f"{url}/run"), PREFIX)[0].step == 24


def test_a_checkpoint_that_makes_training_diverge_is_quarantined_on_s3(
    start_train: Start, s3: S3Server, url: str, tmp_path: Path
) -> None:
    awaited = tmp_path / "committed"
    run = start_train(
        *PAIR,
        NO_LAST_SAVE,
        f"ckpt.storage={url}",
        "model.module._target_=tests.recovery.modules.DivergingGPT",
        "+model.module.bad_step=6",
        "+model.module.interrupt_step=9",
        f"+model.module.awaited={awaited}",
        f"+model.module.marker={tmp_path / 'interrupted'}",
    )
    run.wait_until(lambda: run.events("checkpoint_committed"))
    awaited.touch()
    run.wait()
    assert run.returncode == 0, run.output
    digest_of(run.run_dir)  # it is DONE
    assert [event["step"] for event in run.events("restored")] == [6, 6]
    (rejected,) = run.events("checkpoint_rejected")
    assert rejected["step"] == 6
    assert rejected["path"].startswith(f"{url}/run/{PREFIX}-step-00000006.0-")
    assert "at step 8 in attempt 1, at step 8 in attempt 2" in rejected["reason"]
    root = open_root(f"{url}/run")
    assert {incident.saved_by for incident in read_quarantine(root).incidents} == {0}
    assert not (run.run_dir / "checkpoints").exists()
