"""Find out what this machine has. No torch: the answer is needed before ranks start."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import psutil
import pynvml

from hetero_fw.hardware import DEVICES


def probe_cuda_devices() -> tuple[str, ...]:
    """Names of the CUDA devices that NVML reports; empty without a driver.

    `CUDA_VISIBLE_DEVICES` narrows the list as it narrows torch's.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        names = tuple(str(pynvml.nvmlDeviceGetName(handle)) for handle in handles)
    finally:
        pynvml.nvmlShutdown()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return names
    kept = [part for part in visible.split(",") if part.strip() and not part.startswith("-1")]
    return names[: len(kept)]


def match_device(nvml_name: str, memory_gib: float | None = None) -> str | None:
    """Catalog key of a device by the name its driver reports, None if it is not known."""
    text = nvml_name.lower().replace("-", " ").replace("_", " ").replace("rtx ", "rtx")
    # Whole words: an L40 is no L4, a GH200 no H200 and a T400 no T4.
    words = text.split()
    candidates = []
    for key in DEVICES:
        model, _, memory = key.partition("-")
        if model in words:
            gib = float(memory.removesuffix("gb")) if memory.endswith("gb") else None
            distance = abs(gib - memory_gib) if gib and memory_gib else 0.0
            candidates.append((memory not in words, distance, key))
    return min(candidates)[2] if candidates else None


def probe_local_groups() -> dict[str, dict[str, Any]]:
    """Hardware groups of this machine in the form of `hardware.groups`."""
    names = probe_cuda_devices()
    known = [key for key in map(match_device, names) if key is not None]
    if names and len(known) == len(names) and len(set(known)) == 1:
        return {"local": {"device": known[0], "num_nodes": 1, "devices_per_node": len(known)}}
    memory_gib = psutil.virtual_memory().total / 2**30
    return {
        "local": {
            "device": "cpu",
            "num_nodes": 1,
            "devices_per_node": 1,
            "memory_gib": round(memory_gib, 2),
        }
    }


def probe_host_flops(*, size: int = 64, batch: int = 400, rounds: int = 12) -> float:
    """Rate of small fp32 matrix products that the cores of this machine reach, in FLOP/s.

    Processor time, best of a few rounds: what else the machine does at the moment does not count.
    The products are small on purpose: BLAS computes them in one thread, so that no time is spent
    waiting for other threads, and their rate is close to what training of a small model reaches.
    """
    rng = np.random.default_rng(0)
    left = rng.standard_normal((batch, size, size), dtype=np.float32)
    right = rng.standard_normal((batch, size, size), dtype=np.float32)
    out = np.matmul(left, right)
    best = 0.0
    for _ in range(rounds):
        start_s = time.process_time()
        np.matmul(left, right, out=out)
        seconds = max(1e-6, time.process_time() - start_s)
        best = max(best, batch * 2.0 * size**3 / seconds)
    return best * len(os.sched_getaffinity(0))
