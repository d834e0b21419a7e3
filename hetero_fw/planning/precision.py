"""The precision that every device of a plan computes natively."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hetero_fw.errors import ConfigError
from hetero_fw.hardware import DeviceKind, DeviceSpec, Dtype, Precision

# CPUs compute bf16 in software at about the fp32 rate, but with the same results.
_CPU_DTYPES = (Dtype.FP32, Dtype.BF16)


class PrecisionChoice(NamedTuple):
    """A precision and why it was chosen, as one sentence."""

    precision: Precision
    reason: str


def choose_precision(devices: Sequence[DeviceSpec], requested: str = "auto") -> PrecisionChoice:
    """The precision to train in on `devices`.

    `auto` takes bf16-mixed if all devices have bf16, else 16-mixed if all have fp16, else
    32-true; CPUs alone train in 32-true.

    Raises:
        ConfigError: the `requested` precision is not native on a device; names that device.
    """
    if requested != "auto":
        return _checked(devices, Precision(requested))
    if all(device.kind is DeviceKind.CPU for device in devices):
        return PrecisionChoice(Precision.FP32, "precision 32-true: the devices are CPUs")
    missing: list[str] = []
    for precision in (Precision.BF16_MIXED, Precision.FP16_MIXED):
        lacking = _names_lacking(devices, precision)
        dtype = precision.compute_dtype
        if not lacking:
            why = "; ".join([f"every device computes {dtype} natively", *missing])
            return PrecisionChoice(precision, f"precision {precision}: {why}")
        missing.append(f"{', '.join(lacking)} without native {dtype}")
    return PrecisionChoice(Precision.FP32, f"precision 32-true: {'; '.join(missing)}")


def _checked(devices: Sequence[DeviceSpec], precision: Precision) -> PrecisionChoice:
    lacking = _names_lacking(devices, precision)
    if lacking:
        valid = [str(other) for other in Precision if not _names_lacking(devices, other)]
        raise ConfigError(
            f"parallel.precision={precision}: {', '.join(lacking)} cannot compute "
            f"{precision.compute_dtype} natively. Choose from: {', '.join(['auto', *valid])}."
        )
    return PrecisionChoice(precision, f"precision {precision}: set by parallel.precision")


def _names_lacking(devices: Sequence[DeviceSpec], precision: Precision) -> list[str]:
    dtype = precision.compute_dtype
    return list(dict.fromkeys(d.name for d in devices if not computes_natively(d, dtype)))


def computes_natively(device: DeviceSpec, dtype: Dtype) -> bool:
    """Whether a plan may let `device` compute in `dtype`."""
    return dtype in _CPU_DTYPES if device.kind is DeviceKind.CPU else device.is_native(dtype)
