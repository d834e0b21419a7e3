"""Storage that cannot be used and weights that are none are told before any process starts."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from hetero_fw.app import compose_checked, run
from hetero_fw.app.build import build_without_values
from hetero_fw.app.storage_settings import StoredRun
from hetero_fw.app.usable import check_usable
from hetero_fw.errors import ConfigError
from hetero_fw.monitoring import EventLog, RunDirectory, Status, write_status
from recipes.gpt import GPTModule
from tests.small_disk import read_only_view
from tests.storage_faults import FULL, Fault, faulty_storage

EMULATED = ("hardware=a100_v100_mix", "hardware.emulation.host_flops_per_s=1e10")


def config(tmp_path: Path, *overrides: str) -> DictConfig:
    return compose_checked(
        [f"paths.root={tmp_path / 'out'}", "run_name=run", *EMULATED, *overrides]
    )


def refusal(capsys: pytest.CaptureFixture[str], cfg: DictConfig) -> str:
    """The one line of a run that was refused before it wrote anything."""
    assert run(cfg) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert "1 problem in the configuration" in told
    assert not Path(cfg.paths.root).exists()
    return told


@pytest.mark.parametrize("below", ["", "/folder"])
def test_a_file_is_no_storage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], below: str
) -> None:
    file = tmp_path / "file"
    file.touch()
    told = refusal(capsys, config(tmp_path, f"ckpt.storage={file}{below}"))
    assert f"ckpt.storage={file}{below}: {file} is not a directory." in told
    told = refusal(capsys, config(tmp_path, f"ckpt.tiers.local={file}{below}"))
    assert f"ckpt.tiers.local={file}{below}: {file} is not a directory." in told


def test_a_run_directory_whose_checkpoints_are_not_mounted_is_not_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config(tmp_path)
    run_dir = RunDirectory(tmp_path / "out" / "run")
    run_dir.path.mkdir(parents=True)
    run_dir.checkpoints_path.symlink_to(tmp_path / "scratch")
    with EventLog(run_dir.events_path, 0) as events:
        events.write("checkpoint_committed", step=24)
    assert run(cfg) == 2
    told = capsys.readouterr()
    assert len(told.err.splitlines()) == 1
    assert f"{run_dir.checkpoints_path} is not a directory" in told.err
    assert told.out == ""
    (tmp_path / "scratch").mkdir()
    check_usable(cfg, run_dir, StoredRun())


def test_a_mount_that_is_read_only_is_no_storage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "disk").mkdir()
    with read_only_view(tmp_path / "view", tmp_path / "disk") as view:
        told = refusal(capsys, config(tmp_path, f"ckpt.storage={view}"))
        assert f"cannot keep checkpoints in {view}/run (Read-only file system)" in told
        check_usable(config(tmp_path, f"ckpt.storage={view}", "ckpt=none"), None, StoredRun())


def test_a_directory_without_permission_is_no_storage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with faulty_storage(tmp_path) as storage:
        cfg = config(tmp_path, f"ckpt.storage={storage.root}")
        storage.inject(Fault(operations=("mkdir",), error=errno.EACCES))
        told = refusal(capsys, cfg)
        assert f"cannot keep checkpoints in {storage.root}/run (Permission denied)" in told
        # A finished run keeps nothing more.
        run_dir = RunDirectory(tmp_path / "done" / "run")
        run_dir.path.mkdir(parents=True)
        write_status(run_dir.status_path, Status.DONE, cfg.trainer.max_steps, 0)
        check_usable(cfg, run_dir, StoredRun())
        for fault in (FULL, Fault(operations=("mkdir",), error=errno.EIO)):
            storage.inject(fault)  # it may pass
            check_usable(cfg, None, StoredRun())
        storage.heal()
        check_usable(cfg, None, StoredRun())
        assert not list(storage.disk.iterdir())


def test_weights_of_another_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "weights.pt"
    own = build_without_values(config(tmp_path))
    assert own is not None
    weights = {name: torch.zeros(tensor.shape) for name, tensor in own.state_dict().items()}
    torch.save(weights, file)
    cfg = config(tmp_path, f"model.init_from={file}")
    check_usable(cfg, None, StoredRun())
    first = sorted(weights)[0]
    torch.save({**weights, first: torch.zeros(3), "other": torch.zeros(1)}, file)
    told = refusal(capsys, cfg)
    assert f"model.init_from: {file} does not fit the module: the module has no other" in told
    assert f"{first} is [3], expected" in told
    # A module that cannot be made without values is looked at in the ranks.
    needy = "model.module._target_=tests.unit.app.test_usable.NeedsValues"
    check_usable(config(tmp_path, f"model.init_from={file}", needy), None, StoredRun())


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("ManualGPT", "has automatic_optimization=False"),
        ("TwoOptimizersGPT", "returns 2 optimizers, and one is supported"),
    ],
)
def test_a_module_that_is_not_trained_with_one_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], module: str, words: str
) -> None:
    target = f"model.module._target_=tests.recovery.modules.{module}"
    assert words in refusal(capsys, config(tmp_path, "optim=module", target))


def test_what_the_ranks_alone_can_see_of_an_optimizer(tmp_path: Path) -> None:
    for name in ("recovery.modules.OwnOptimizerGPT", f"unit.app.{Path(__file__).stem}.NeedsValues"):
        cfg = config(tmp_path, "optim=module", f"model.module._target_=tests.{name}")
        check_usable(cfg, None, StoredRun())


class NeedsValues(GPTModule):
    def __init__(self, **gpt: Any) -> None:
        super().__init__(**gpt)
        self.first = next(self.parameters()).flatten()[0].item()


def test_a_file_that_holds_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "weights.txt"
    file.write_text("none\n")
    cfg = config(tmp_path, f"model.init_from={file}")
    assert f"model.init_from: {file}: is neither a safetensors file" in refusal(capsys, cfg)
    check_usable(cfg, None, StoredRun(checkpoints=("hetero_ckpt-step-00000006",)))
    both = config(tmp_path, f"model.init_from={file}", f"ckpt.storage={file}")
    with pytest.raises(ConfigError) as caught:
        check_usable(both, None, StoredRun())
    assert "model.init_from" in str(caught.value)
    assert "ckpt.storage" in str(caught.value)
