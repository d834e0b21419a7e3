"""The GPUs of this machine as the driver sees them, and whether the installed torch fits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pynvml


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, named by what does not change with CUDA_VISIBLE_DEVICES."""

    name: str
    uuid: str
    memory_bytes: int
    compute_capability: tuple[int, int]

    @property
    def is_bf16_native(self) -> bool:
        """Whether it computes bfloat16 in hardware (Ampere and later)."""
        return self.compute_capability >= (8, 0)


def list_gpus() -> tuple[Gpu, ...]:
    """All GPUs that NVML reports; empty without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return tuple(
            Gpu(
                name=str(pynvml.nvmlDeviceGetName(handle)),
                uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
                memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                compute_capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
            )
            for handle in handles
        )
    finally:
        pynvml.nvmlShutdown()


def runs_on(capability: tuple[int, int], arch_list: Sequence[str]) -> bool:
    """Whether a torch built for `arch_list` (as `torch.cuda.get_arch_list()`) has code for a GPU.

    Compiled code (`sm_80`) runs on the same major version from its minor version on; portable code
    (`compute_90`) on everything later.
    """
    for arch in arch_list:
        kind, _, digits = arch.partition("_")
        digits = digits.rstrip("af")
        built = (int(digits[:-1]), int(digits[-1]))
        if kind == "compute" and capability >= built:
            return True
        if kind == "sm" and capability[0] == built[0] and capability[1] >= built[1]:
            return True
    return False
