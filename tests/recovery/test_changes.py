"""Runs that are continued with another configuration, or by another release."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero_fw.checkpoint import list_checkpoints, read_manifest
from hetero_fw.cli import main
from tests.conftest import TrainRun
from tests.recovery.runs import PAIR, column, digest_of, undisturbed
from tests.recovery.test_kill import Start, rank_pid
from tests.unit.checkpoint.examples import PREFIX, make_newer

Train = Callable[..., TrainRun]

SHORT = (*PAIR, "ckpt.interval_steps=4")
FIRST = (*SHORT, "trainer.max_steps=8")
LONGER = (*SHORT, "trainer.max_steps=12")
COSINE = (
    "optim.scheduler={_target_:torch.optim.lr_scheduler.CosineAnnealingLR,_partial_:true,"
    "T_max:12,eta_min:1e-5}"
)
MILESTONES = (
    "optim.scheduler={_target_:torch.optim.lr_scheduler.MultiStepLR,_partial_:true,"
    "milestones:[2,%d]}"
)


def rates(run_dir: Path) -> list[float]:
    return [float(text) for text in column(run_dir, "lr")]


def continued(train: Train, before: tuple[str, ...], after: tuple[str, ...]) -> TrainRun:
    first = train(*FIRST, *before)
    assert first.returncode == 0, first.output
    second = train(*LONGER, *after)
    assert second.returncode == 0, second.output
    assert [event["step"] for event in second.events("restored")] == [8]
    return second


@pytest.mark.parametrize("schedule", [(), (COSINE,)])
def test_what_is_not_changed_goes_on_bit_by_bit(
    train: Train, tmp_path: Path, schedule: tuple[str, ...]
) -> None:
    run = continued(train, schedule, schedule)
    assert "changed since the checkpoint" not in run.output
    expected = undisturbed(tmp_path / "undisturbed", *LONGER, *schedule)
    assert column(run.run_dir, "lr") == column(expected, "lr")
    assert digest_of(run.run_dir) == digest_of(expected)


def test_another_rate_takes_effect(train: Train) -> None:
    run = continued(train, (), ("optim.optimizer.lr=0.004", "optim.optimizer.weight_decay=0.2"))
    assert rates(run.run_dir) == pytest.approx([1e-3] * 8 + [4e-3] * 4)
    told = "optim, changed since the checkpoint of step 8 and used from there on: "
    assert told + "lr 0.001 -> 0.004, weight_decay 0.1 -> 0.2\n" in run.output
    # It is not undone, and not told again, when the run is continued once more.
    again = train(
        *SHORT,
        "trainer.max_steps=16",
        "optim.optimizer.lr=0.004",
        "optim.optimizer.weight_decay=0.2",
    )
    assert again.returncode == 0, again.output
    assert again.output.count(told) == 0
    assert rates(run.run_dir)[12:] == pytest.approx([4e-3] * 4)


def test_another_rate_is_the_base_of_the_schedule(train: Train, tmp_path: Path) -> None:
    run = continued(train, (COSINE,), (COSINE, "optim.optimizer.lr=0.004"))
    expected = undisturbed(tmp_path / "other", *LONGER, COSINE, "optim.optimizer.lr=0.004")
    assert rates(run.run_dir)[8:] == pytest.approx(rates(expected)[8:], rel=1e-9)
    assert "lr 0.001 -> 0.004, initial_lr 0.001 -> 0.004" in run.output


@pytest.mark.parametrize(
    ("before", "after", "told", "expected"),
    [
        (
            (MILESTONES % 5,),
            (MILESTONES % 10,),
            "scheduler.milestones",
            [1e-4] * 2 + [1e-5] * 2,
        ),
        ((), (MILESTONES % 10,), "scheduler None -> MultiStepLR", [1e-4] * 2 + [1e-5] * 2),
        ((MILESTONES % 5,), (), "scheduler MultiStepLR -> None", [1e-3] * 4),
    ],
)
def test_another_schedule_takes_effect(
    train: Train,
    before: tuple[str, ...],
    after: tuple[str, ...],
    told: str,
    expected: list[float],
) -> None:
    run = continued(train, before, after)
    assert rates(run.run_dir)[8:] == pytest.approx(expected)
    assert told in run.output


def test_another_class_of_optimizer_begins_with_an_empty_state(train: Train) -> None:
    run = continued(train, (COSINE,), ("optim=sgd", "optim.optimizer.lr=0.02"))
    told = [line for line in run.output.splitlines() if line.startswith("optim, changed since")]
    assert told == [
        "optim, changed since the checkpoint of step 8 and used from there on: optimizer AdamW -> "
        "SGD, which begins with an empty state; of the checkpoint the weights alone are restored"
    ]
    assert rates(run.run_dir)[8:] == pytest.approx([0.02] * 4)
    newest = run.run_dir / "checkpoints" / "hetero_ckpt-step-00000012" / "manifest.json"
    content = json.loads(newest.read_text())
    kept = {name.rpartition(".")[2] for name in content["tensors"] if name.startswith("optim.")}
    assert kept == {"momentum_buffer"}
    assert "betas" not in content["state"]["optimizer"]["param_groups"][0]


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_a_checkpoint_of_a_newer_release_is_not_started_over(train: Train, resume: str) -> None:
    first = train(*FIRST)
    newest = first.run_dir / "checkpoints" / "hetero_ckpt-step-00000008"
    manifest = newest / "manifest.json"
    make_newer(manifest.parent)
    second = train(*LONGER, f"resume={resume}")
    assert second.returncode == 1, second.output
    assert not second.events("restored")
    assert not second.events("checkpoint_rejected")
    assert not second.events("restart")
    reason = second.read_json("status.json")["reason"]
    assert f"resume={resume}: {manifest}: is of a newer release" in reason
    assert "choose another run_name to start fresh" in reason
    assert newest.is_dir()
    assert len(column(first.run_dir, "loss")) == 8


def test_another_hash_reads_what_there_is_and_verifies_what_is_new(
    start_train: Start, tmp_path: Path
) -> None:
    nodes = (*SHORT, f"ckpt.tiers.local={tmp_path}/nodes")
    first = start_train(*nodes, "ckpt.hash=sha256", "trainer.max_steps=24")
    first.wait_until(lambda: first.events("checkpoint_committed"))
    os.kill(rank_pid(first, 1), signal.SIGKILL)
    first.wait()
    assert first.returncode == 0, first.output
    (restored,) = first.events("restored")
    assert restored["tiers"] == ["local"]
    second = start_train(*nodes, "ckpt.hash=blake2b", "trainer.max_steps=28").wait()
    assert second.returncode == 0, second.output
    assert [event["step"] for event in second.events("restored")] == [restored["step"], 24]
    assert not second.events("checkpoint_rejected")
    assert not second.events("checkpoint_failed")
    paths = {i.step: i.path for i in list_checkpoints(second.run_dir / "checkpoints", PREFIX)}
    hashes = {step: read_manifest(path).hash for step, path in paths.items()}
    assert (hashes[24], hashes[28]) == ("sha256", "blake2b")
    expected = undisturbed(tmp_path / "undisturbed", *SHORT, "trainer.max_steps=28")
    assert digest_of(second.run_dir) == digest_of(expected)
    assert main(["ckpt", "verify", str(second.run_dir)]) == 0
    for step in (24, 28):
        shard = paths[step] / "shard-00000.bin"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
        assert main(["ckpt", "verify", str(second.run_dir), "--step", str(step)]) == 1
