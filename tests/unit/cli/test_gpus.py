"""Which GPUs a torch build has code for."""

from __future__ import annotations

import pytest

from hetero_fw.cli.doctor import describe_gpus, judge_torch
from hetero_fw.cli.findings import Level
from hetero_fw.cli.gpus import Gpu, runs_on

V100 = Gpu(name="V100", uuid="GPU-1", memory_bytes=32 * 2**30, compute_capability=(7, 0))
A100 = Gpu(name="A100", uuid="GPU-2", memory_bytes=80 * 2**30, compute_capability=(8, 0))


@pytest.mark.parametrize(
    ("capability", "arch_list", "does_run"),
    [
        ((7, 0), ["sm_70", "sm_80"], True),
        ((7, 0), ["sm_75", "sm_80"], False),
        ((8, 6), ["sm_80"], True),
        ((9, 0), ["sm_80", "sm_86"], False),
        ((9, 0), ["sm_80", "compute_80"], True),
        ((8, 0), ["sm_80", "compute_90"], True),
        ((8, 0), ["compute_90"], False),
        ((9, 0), ["sm_90a"], True),
        ((12, 0), ["sm_100", "sm_120"], True),
        ((7, 0), [], False),
    ],
)
def test_runs_on(capability: tuple[int, int], arch_list: list[str], does_run: bool) -> None:
    assert runs_on(capability, arch_list) is does_run


def test_a_v100_needs_the_right_wheel() -> None:
    (finding,) = judge_torch(
        version="2.13.0+cu128", arch_list=["sm_75", "sm_80"], gpus=(V100, A100)
    )
    assert finding.level is Level.PROBLEM
    assert "no code for V100" in finding.detail
    assert "cu126" in finding.remedy
    (finding,) = judge_torch(
        version="2.13.0+cu126", arch_list=["sm_70", "sm_80"], gpus=(V100, A100)
    )
    assert finding.level is Level.OK


def test_gpus_name_the_precision_that_suits_them() -> None:
    first, second, *_ = describe_gpus((V100, A100))
    assert "no native bf16, use 16-mixed" in first.detail
    assert "80.0 GiB, sm_80, bf16 native" in second.detail
    (none,) = describe_gpus(())
    assert "emulated" in none.detail
