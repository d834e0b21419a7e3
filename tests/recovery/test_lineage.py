"""What a run continues from where its tiers hold steps that it has not gone on from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TrainRun
from tests.recovery.runs import NO_LAST_SAVE, PAIR, column, digest_of, faulty, undisturbed

Train = Callable[..., TrainRun]

# Every fourth step to the nodes, of these the third to the storage; without postponed saves.
SAVES = (
    *PAIR,
    NO_LAST_SAVE,
    "ckpt.interval_steps=4",
    "ckpt.async_mode=disabled",
    "recovery.max_restarts=0",
)
STORED = 12


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(tmp_path_factory.mktemp("plain"), *PAIR)


def on_nodes(tmp_path: Path) -> tuple[str, ...]:
    return f"ckpt.tiers.local={tmp_path}/nodes", f"ckpt.tiers.storage_interval_steps={STORED}"


def leave_nodes_ahead(train: Train, tmp_path: Path) -> None:
    """Attempt 0 breaks after it has saved step 20 to the nodes and 12 to the storage."""
    run = train(*SAVES, *on_nodes(tmp_path), *faulty(fail_step=22))
    assert run.returncode == 1, run.output
    saved = [(event["step"], event["tier"]) for event in run.events("checkpoint_committed")]
    assert (20, "local") in saved
    assert [step for step, tier in saved if tier == "storage"] == [STORED]


@pytest.mark.parametrize(
    ("broken_at", "continued_from"),
    [
        pytest.param(18, 16, id="what came in their place"),
        pytest.param(14, 20, id="nodes, if nothing came in their place"),
    ],
)
def test_an_attempt_without_the_nodes_leaves_them_behind_once_it_has_saved(
    train: Train, tmp_path: Path, plain_run: Path, broken_at: int, continued_from: int
) -> None:
    leave_nodes_ahead(train, tmp_path)
    second = train(*SAVES, *faulty(fail_step=broken_at))
    assert second.returncode == 1, second.output
    assert [event["step"] for event in second.events("restored")] == [STORED]
    assert f"{tmp_path}/nodes/run holds step 20 of this run, which goes on from" in second.output
    third = train(*SAVES, *on_nodes(tmp_path))
    assert third.returncode == 0, third.output
    assert [event["step"] for event in third.events("restored")] == [STORED, continued_from]
    left = f"step 20 of attempt 0 is passed over: attempt 1 went on from step {STORED}"
    reasons = [event["reason"] for event in third.events("checkpoint_rejected")]
    assert [left in reason for reason in reasons] == [True] * (continued_from == 16)
    assert (left in third.output) == (continued_from == 16)
    assert column(third.run_dir, "loss") == column(plain_run, "loss")  # every step counts once
    assert digest_of(third.run_dir) == digest_of(plain_run)
