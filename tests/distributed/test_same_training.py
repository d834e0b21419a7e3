"""The same seed and global batch give the same training on any cluster and any split."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

STEPS = 50
COMMON = (
    "hardware.emulation.dilation=2000",
    "model.module.model_dim=32",
    "model.module.num_layers=2",
    "data.sequence_length=16",
    f"trainer.max_steps={STEPS}",
    "ckpt=none",
    "monitor=none",
)
CLUSTERS = {
    "uniform 2+2": ("hardware=a100_v100_mix", "parallel=uniform"),
    "auto 2+2": ("hardware=a100_v100_mix",),
    "auto 1+2": ("hardware=a100_v100_mix", "hardware.groups.a100.devices_per_node=1"),
    "accumulating, ZeRO-3": (
        "hardware=a100_v100_mix",
        "parallel.zero_stage=3",
        "parallel.max_microbatch_size=7",
    ),
}


def losses(root: Path, name: str, overrides: tuple[str, ...]) -> list[float]:
    command = [sys.executable, str(REPOSITORY / "train.py"), f"paths.root={root}"]
    command += [f"run_name={name}", *COMMON, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    with (root / name / "metrics.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the same training on one device, without emulation or sharding."""
    return losses(tmp_path_factory.mktemp("one"), "one", ("hardware=local",))


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_losses_agree_with_one_device(
    one_device: list[float], tmp_path: Path, cluster: str
) -> None:
    found = losses(tmp_path, "many", CLUSTERS[cluster])
    assert len(found) == len(one_device) == STEPS
    assert one_device[-1] < one_device[0] - 0.5
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, one_device, strict=True))
    assert worst <= 1e-4, f"largest relative difference of the loss {worst:.1e}"
