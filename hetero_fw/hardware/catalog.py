"""Known devices and links. Peak rates are dense: figures with structured sparsity are halved.

A device is what one rank drives. Where a card or chip shows up as two devices (MI250, TPU v3),
the entry is one of the two. Memory is the nominal size; `parallel.memory_margin` covers what
drivers and ECC take of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hetero_fw.errors import ConfigError, did_you_mean
from hetero_fw.hardware.spec import GIB, DeviceKind, DeviceSpec, Dtype, LinkSpec

_TERA = 1e12
_GIGA = 1e9


def _device(
    name: str,
    kind: DeviceKind,
    gib: float,
    bandwidth_gb_per_s: float,
    peak_tflops: Mapping[str, float],
    source: str,
    compute_capability: tuple[int, int] | None = None,
) -> DeviceSpec:
    rates = {Dtype(dtype): tflops * _TERA for dtype, tflops in peak_tflops.items()}
    return DeviceSpec(
        name=name,
        kind=kind,
        memory_bytes=int(gib * GIB),
        peak_flops=rates,
        memory_bytes_per_s=bandwidth_gb_per_s * _GIGA,
        compute_capability=compute_capability,
        source=source,
    )


_CUDA, _ROCM, _TPU, _CPU = DeviceKind.CUDA, DeviceKind.ROCM, DeviceKind.TPU, DeviceKind.CPU
_V100 = {"fp32": 15.7, "fp16": 125}
_A100 = {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312}
_H100 = {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9}
_L4 = {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121, "fp8": 242.5}
_L40S = {"fp32": 91.6, "tf32": 183, "bf16": 362.05, "fp16": 362.05, "fp8": 733}
_A10 = {"fp32": 31.2, "tf32": 62.5, "bf16": 125, "fp16": 125}
_T4 = {"fp32": 8.1, "fp16": 65}
# GeForce cards run half precision with fp32 accumulation, as training needs, at half their best.
_RTX3090 = {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71}
_RTX4090 = {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3}
_MI250_DIE = {"fp32": 45.25, "bf16": 181.05, "fp16": 181.05}
_MI300X = {"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9}
_TPU_FP32 = "; fp32 = bf16 / 6, the passes XLA takes at highest precision"

_ALL_DEVICES = (
    _device("v100-16gb", _CUDA, 16, 900, _V100, "NVIDIA V100 data sheet, SXM2", (7, 0)),
    _device("v100-32gb", _CUDA, 32, 900, _V100, "NVIDIA V100 data sheet, SXM2", (7, 0)),
    _device("a100-40gb", _CUDA, 40, 1555, _A100, "NVIDIA A100 data sheet, SXM4", (8, 0)),
    _device("a100-80gb", _CUDA, 80, 2039, _A100, "NVIDIA A100 data sheet, SXM4", (8, 0)),
    _device("h100-80gb", _CUDA, 80, 3350, _H100, "NVIDIA H100 data sheet, SXM5", (9, 0)),
    _device("h200-141gb", _CUDA, 141, 4800, _H100, "NVIDIA H200 data sheet, SXM5", (9, 0)),
    _device("l4", _CUDA, 24, 300, _L4, "NVIDIA L4 data sheet", (8, 9)),
    _device("l40s", _CUDA, 48, 864, _L40S, "NVIDIA L40S data sheet", (8, 9)),
    _device("a10", _CUDA, 24, 600, _A10, "NVIDIA A10 data sheet", (8, 6)),
    _device("t4", _CUDA, 16, 320, _T4, "NVIDIA T4 data sheet", (7, 5)),
    _device("rtx3090", _CUDA, 24, 936, _RTX3090, "NVIDIA GA102 white paper", (8, 6)),
    _device("rtx4090", _CUDA, 24, 1008, _RTX4090, "NVIDIA AD102 white paper", (8, 9)),
    _device("mi250", _ROCM, 64, 1638.4, _MI250_DIE, "AMD MI250 data sheet, one of the two dies"),
    _device("mi300x", _ROCM, 192, 5300, _MI300X, "AMD MI300X data sheet"),
    _device(
        "tpu-v3",
        _TPU,
        16,
        450,
        {"fp32": 61.5 / 6, "bf16": 61.5},
        "Google Cloud TPU v3 system architecture, one of the two cores" + _TPU_FP32,
    ),
    _device(
        "tpu-v4",
        _TPU,
        32,
        1228,
        {"fp32": 275 / 6, "bf16": 275},
        "Google Cloud TPU v4 system architecture" + _TPU_FP32,
    ),
    _device(
        "tpu-v5e",
        _TPU,
        16,
        819,
        {"fp32": 197 / 6, "bf16": 197},
        "Google Cloud TPU v5e system architecture" + _TPU_FP32,
    ),
    _device(
        "cpu",
        _CPU,
        16,
        50,
        {"fp32": 0.768, "bf16": 0.768},
        "8 AVX2 cores at 3 GHz, 32 FLOP a cycle; bf16 counted at the fp32 rate",
    ),
)


def _link(name: str, gb_per_s: float, latency_s: float) -> LinkSpec:
    return LinkSpec(name=name, bytes_per_s=gb_per_s * _GIGA, latency_s=latency_s)


# Nominal rates of one direction; NVLink is the sum of a device's lanes, PCIe has 16 lanes.
_ALL_LINKS = (
    _link("nvlink2", 150, 3e-6),
    _link("nvlink3", 300, 3e-6),
    _link("nvlink4", 450, 3e-6),
    _link("pcie3", 15.75, 5e-6),
    _link("pcie4", 31.5, 5e-6),
    _link("pcie5", 63, 5e-6),
    _link("eth_1g", 0.125, 30e-6),
    _link("eth_10g", 1.25, 30e-6),
    _link("eth_25g", 3.125, 30e-6),
    _link("eth_100g", 12.5, 20e-6),
    _link("ib_100g", 12.5, 5e-6),
    _link("ib_200g", 25, 5e-6),
    _link("ib_400g", 50, 5e-6),
    _link("ici", 50, 1e-6),
    _link("host", 10, 5e-6),
)

DEVICES: Mapping[str, DeviceSpec] = MappingProxyType({spec.name: spec for spec in _ALL_DEVICES})
LINKS: Mapping[str, LinkSpec] = MappingProxyType({spec.name: spec for spec in _ALL_LINKS})


def unknown_name(key: str, value: object, choices: Mapping[str, object], noun: str) -> str:
    """The message for a `value` of config key `key` that is not among `choices`."""
    return (
        f"{key}={value} is not a known {noun}."
        f"{did_you_mean(str(value), choices)} Choose from: {', '.join(choices)}."
    )


def device(name: str, *, key: str = "device") -> DeviceSpec:
    """The catalog's device `name`.

    Raises:
        ConfigError: no such device; names the config `key`, the choices and the closest one.
    """
    if name not in DEVICES:
        raise ConfigError(unknown_name(key, name, DEVICES, "device"))
    return DEVICES[name]


def link(name: str, *, key: str = "link") -> LinkSpec:
    """The catalog's link `name`.

    Raises:
        ConfigError: no such link; names the config `key`, the choices and the closest one.
    """
    if name not in LINKS:
        raise ConfigError(unknown_name(key, name, LINKS, "link"))
    return LINKS[name]
