"""How much a run is taken to need for its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from torch import nn

from hetero_fw.app import compose_checked
from hetero_fw.app.space import check_space, check_space_of
from hetero_fw.errors import ConfigError
from hetero_fw.hardware import LayerProfile, WorkloadProfile
from hetero_fw.monitoring import RunDirectory, Status, write_status

# 6,000 TB in weights: on no disk. Without AdamW's state it is a third.
HUGE = 10**15


def config(root: Path, *overrides: str) -> DictConfig:
    return compose_checked([f"paths.root={root}", "run_name=run", *overrides])


def workload(num_params: int) -> WorkloadProfile:
    layer = LayerProfile(
        name="x", num_params=num_params, forward_flops=1, backward_flops=1, activation_bytes=1
    )
    return WorkloadProfile(name="x", layers=(layer,))


def problems(cfg: DictConfig, num_params: int, previous: RunDirectory | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        check_space(cfg, workload(num_params), previous)
    return "\n".join(caught.value.problems)


def test_disk_and_host_memory_are_judged(tmp_path: Path) -> None:
    told = problems(config(tmp_path), HUGE)
    assert "three checkpoints, two that are kept and one that is being written, " in told
    assert f"need 31.97 PiB on {tmp_path}" in told
    assert "needs 10.66 PiB of host memory" in told
    check_space(config(tmp_path), workload(1000), None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "size"),
    [
        ((), "10.66 PiB"),
        (("optim=sgd",), "7.11 PiB"),
        (("optim=sgd", "optim.optimizer.momentum=0"), "3.55 PiB"),
        (("optim=module",), "3.55 PiB"),
        (("ckpt.save_optimizer_states=false",), "3.55 PiB"),
    ],
    ids=str,
)
def test_the_optimizer_counts_as_far_as_it_is_known(
    tmp_path: Path, overrides: tuple[str, ...], size: str
) -> None:
    assert f"needs {size} of host memory" in problems(config(tmp_path, *overrides), HUGE)


def test_nothing_is_needed_where_nothing_is_saved(tmp_path: Path) -> None:
    check_space(config(tmp_path, "ckpt=none"), workload(HUGE), None)
    check_space(config(tmp_path, "mode=plan"), workload(HUGE), None)
    (tmp_path / "run").mkdir()
    previous = RunDirectory(tmp_path / "run")
    cfg = config(tmp_path, "trainer.max_steps=5")
    write_status(previous.status_path, Status.DONE, 5, 0, "")
    check_space(cfg, workload(HUGE), previous)
    write_status(previous.status_path, Status.DONE, 4, 0, "")
    assert str(previous.checkpoints_path) in problems(cfg, HUGE, previous)


def test_a_rank_judges_by_the_module_itself(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = nn.Linear(10**7, 10**8, bias=False)
        module.register_buffer("table", torch.empty(10**15, dtype=torch.int8))
    run_dir = RunDirectory(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"needs 11\.55 PiB of host memory"):
        check_space_of(config(tmp_path), run_dir, module)
    check_space_of(config(tmp_path, "ckpt=none"), run_dir, module)
    check_space_of(config(tmp_path), run_dir, nn.Linear(2, 2))
