"""What users do in hooks belongs to the step: saved with it, and not done twice or half."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hetero_fw.cli.main import main
from tests.conftest import TrainRun
from tests.recovery.runs import PAIR, column, digest_of, faulty, undisturbed

Train = Callable[..., TrainRun]
MODULES = "tests.recovery.modules"
ADAMW = ("optim=adamw",)
VALIDATED = ("optim=module", "trainer.val_interval_steps=6", "trainer.limit_val_batches=2")


def using(module: str, **arguments: object) -> tuple[str, ...]:
    return (
        *PAIR,
        *VALIDATED,
        f"model.module._target_={MODULES}.{module}",
        *(f"+model.module.{name}={value}" for name, value in arguments.items()),
    )


@pytest.fixture
def first_save(run_dir: Path) -> Path:
    """The checkpoint of step 6, once it is there."""
    return run_dir / "checkpoints/hetero_ckpt-step-00000006"


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything in hooks that nobody disturbed."""
    return undisturbed(tmp_path_factory.mktemp("hooked"), *using("CountingGPT"))


def test_a_killed_rank_continues_with_all_that_hooks_did(
    train: Train, tmp_path: Path, hooked: Path, first_save: Path
) -> None:
    # Step 12 has a validation and a save.
    fault = {"fault": "kill", "fail_rank": 1, "fail_step": 15, "awaited": first_save}
    run = train(*using("CountingGPT", **fault, marker=tmp_path / "done"))
    assert run.returncode == 0, run.output
    assert run.events("restored")[0]["step"] >= 6
    assert digest_of(run.run_dir) == digest_of(hooked)
    assert column(run.run_dir, "lr") == column(hooked, "lr")


@pytest.mark.parametrize("fail_step", [9, 13])
def test_an_exception_saves_what_hooks_did(
    train: Train, tmp_path: Path, hooked: Path, fail_step: int
) -> None:
    marker = tmp_path / "done"
    fault = using("ForgettingGPT", fail_rank=1, fail_step=fail_step, marker=marker)
    run = train(*fault, "ckpt.interval_steps=100")
    assert run.returncode == 0, run.output
    assert run.events("restored")[0]["step"] == fail_step - 1
    assert digest_of(run.run_dir) == digest_of(hooked)


def test_a_step_that_a_hook_has_half_done_is_not_saved(
    train: Train, tmp_path: Path, hooked: Path
) -> None:
    fault = using("ForgettingGPT", hook_fail_step=8, marker=tmp_path / "done")
    run = train(*fault, "ckpt.interval_steps=100")
    assert run.returncode == 0, run.output
    assert not [event for event in run.events("emergency_save") if event["is_saved"]]
    told = "rank 0 has raised while weights changed after step 7, so nothing is saved now; "
    assert f"{told}no checkpoint is safe yet, a restart begins at step 0" in run.output
    assert digest_of(run.run_dir) == digest_of(hooked)


def test_a_module_with_state_of_its_own_is_not_saved_in_the_middle_of_a_step(
    train: Train, tmp_path: Path, hooked: Path
) -> None:
    fault = using("CountingGPT", fail_rank=1, fail_step=9, marker=tmp_path / "done")
    # With no save before, none is too slow to be worth it.
    run = train(*fault, "ckpt.interval_steps=100")
    assert run.returncode == 0, run.output
    assert "rank 1 has raised; step 8 is not saved: " in run.output
    assert "on_save_checkpoint of" in run.output
    assert "; no checkpoint is safe yet, a restart begins at step 0" in run.output
    assert not run.events("restored")
    assert digest_of(run.run_dir) == digest_of(hooked)


def test_what_an_optimizer_keeps_and_what_was_logged_is_that_of_an_undisturbed_run(
    train: Train, tmp_path: Path, first_save: Path
) -> None:
    # The rate of step 14 follows the validation of step 6 or 12, before the save.
    fault = {"fault": "kill", "fail_rank": 1, "fail_step": 15, "awaited": first_save}
    run = train(*using("RememberingGPT", **fault, marker=tmp_path / "done"))
    assert run.returncode == 0, run.output
    assert run.events("restored")[0]["step"] >= 6
    plain = undisturbed(tmp_path / "plain", *using("RememberingGPT"))
    assert column(run.run_dir, "lr") == column(plain, "lr")
    assert len(set(column(plain, "lr"))) > 2
    assert digest_of(run.run_dir) == digest_of(plain)


@pytest.fixture(scope="module")
def drawing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with random numbers in every hook that nobody disturbed."""
    return undisturbed(tmp_path_factory.mktemp("drawing"), *using("DrawingGPT"), *ADAMW)


@pytest.mark.parametrize(("fault", "fail_step"), [("kill", 15), ("raise", 13), ("raise", 10)])
def test_random_numbers_drawn_in_hooks_are_those_of_an_undisturbed_run(
    train: Train, tmp_path: Path, drawing: Path, fault: str, fail_step: int, first_save: Path
) -> None:
    # Step 12 has a validation and a save: hooks of step 13 are the first after a restore, or 10.
    failing = {"fault": fault, "fail_rank": 1, "fail_step": fail_step, "awaited": first_save}
    run = train(*using("DrawingGPT", **failing, marker=tmp_path / "done"), *ADAMW)
    assert run.returncode == 0, run.output
    assert run.events("restored")[0]["step"] >= 6
    assert column(run.run_dir, "loss") == column(drawing, "loss")
    assert digest_of(run.run_dir) == digest_of(drawing)


@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_a_callback_gets_its_state_back_exactly(
    train: Train, tmp_path: Path, fault: str, first_save: Path
) -> None:
    ledger = (
        f"+callbacks.ledger._target_={MODULES}.Ledger",
        f"+callbacks.ledger.folder={tmp_path}",
    )
    failing = {"fault": fault, "fail_rank": 1, "fail_step": 15, "awaited": first_save}
    run = train(*PAIR, *faulty(**failing, marker=tmp_path / "done"), *ledger)
    assert run.returncode == 0, run.output
    (restored,) = run.events("restored")
    for rank in (0, 1):
        assert (tmp_path / f"{restored['step']}-{rank}").exists()
    assert "checkpoints do not keep" not in run.output


def test_weights_that_a_validation_puts_in_are_never_saved(
    train: Train, tmp_path: Path, run_dir: Path
) -> None:
    plain = undisturbed(tmp_path / "plain", *PAIR)
    callback = (
        f"+callbacks.other._target_={MODULES}.OtherWeights",
        f"+callbacks.other.folder={run_dir}/checkpoints",
        "+callbacks.other.fail_step=18",
        f"+callbacks.other.marker={tmp_path}/done",
    )
    run = train(*PAIR, *VALIDATED[1:], *callback)
    assert run.returncode == 0, run.output
    # Nor does training go on with them.
    assert digest_of(run.run_dir) == digest_of(plain)
    # Due at steps 12 and 18, which have a validation; later where the save before takes long.
    kept = [path.name for path in (run.run_dir / "checkpoints").glob("hetero_ckpt-step-*")]
    assert len(kept) > 1
    for name in kept:
        out = tmp_path / f"{name}.safetensors"
        step = str(int(name[-8:]))
        assert main(["ckpt", "export", str(run.run_dir), "--step", step, str(out)]) == 0
        assert all(weights.any() for weights in load_file(out).values())
