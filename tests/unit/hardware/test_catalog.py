from __future__ import annotations

import pickle

import pytest

from hetero_fw.errors import ConfigError, did_you_mean
from hetero_fw.hardware import DEVICES, GIB, LINKS, DeviceKind, Dtype, Precision, device, link

GPUS = ["l4", "l40s", "a10", "t4", "rtx3090", "rtx4090", "mi250", "mi300x"]
SIZED_GPUS = ["a100-40gb", "a100-80gb", "v100-16gb", "v100-32gb", "h100-80gb", "h200-141gb"]
EXPECTED = [*GPUS, *SIZED_GPUS, "tpu-v3", "tpu-v4", "tpu-v5e", "cpu"]


def test_every_promised_device_is_there() -> None:
    assert set(DEVICES) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_device_figures_are_complete_and_plausible(name: str) -> None:
    spec = device(name)
    assert spec.name == name
    assert spec.source
    assert 16 * GIB <= spec.memory_bytes <= 256 * GIB
    assert Dtype.FP32 in spec.peak_flops
    assert 1e11 < min(spec.peak_flops.values()) <= max(spec.peak_flops.values()) < 3e15
    assert 1e10 < spec.memory_bytes_per_s < 1e13
    assert (spec.compute_capability is not None) == (spec.kind is DeviceKind.CUDA)


def test_rates_are_dense() -> None:
    assert device("h100-80gb").peak_flops[Dtype.BF16] == pytest.approx(989.4e12)
    assert device("a100-80gb").peak_flops[Dtype.BF16] == 312e12
    assert device("l4").peak_flops[Dtype.FP8] == 242.5e12


@pytest.mark.parametrize("name", ["v100-16gb", "v100-32gb", "t4"])
def test_volta_and_turing_have_no_bf16(name: str) -> None:
    assert not device(name).is_native(Dtype.BF16)
    assert device(name).is_native(Dtype.FP16)


def test_a100_to_v100_under_fp16() -> None:
    rates = [device(n).flops_per_s(Precision.FP16_MIXED) for n in ("a100-80gb", "v100-32gb")]
    assert rates[0] / rates[1] == pytest.approx(2.496)


def test_links_are_named_by_their_key() -> None:
    assert all(spec.name == name and spec.bytes_per_s > 0 for name, spec in LINKS.items())
    assert link("eth_1g").bytes_per_s < link("eth_25g").bytes_per_s < link("nvlink3").bytes_per_s


def test_unknown_names_are_explained() -> None:
    with pytest.raises(ConfigError, match=r"gpu=a100.*Did you mean 'a100-[48]0gb'.*Choose from"):
        device("a100-60gb", key="gpu")
    with pytest.raises(ConfigError, match=r"link=nvlnk3.*Did you mean 'nvlink3'"):
        link("nvlnk3")


def test_specs_can_be_sent_to_other_processes() -> None:
    for spec in DEVICES.values():
        assert pickle.loads(pickle.dumps(spec)) == spec


def test_did_you_mean_ignores_case_and_stays_silent_without_a_match() -> None:
    assert did_you_mean("Uniform", ["auto", "uniform"]) == " Did you mean 'uniform'?"
    assert did_you_mean("zzz", ["auto", "uniform"]) == ""
    assert did_you_mean("bf16", ["32-true", "bf16-mixed"]) == " Did you mean 'bf16-mixed'?"
    assert did_you_mean("zzz", []) == ""
