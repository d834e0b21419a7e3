"""A declared budget is a hard limit of the process, and exceeding it is recognised."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from hetero_fw.profiling import MemoryMeter, is_out_of_memory
from tests.conftest import REPOSITORY

MIB = 2**20

PROGRAM = """
import json, sys, numpy, torch
from hetero_fw.profiling import is_out_of_memory, limit_memory

torch.zeros(8) @ torch.zeros(8)
limit_memory(int(sys.argv[1]))
held, seen = [], []
for library in ("torch", "numpy"):
    for size in map(int, sys.argv[2:]):
        try:
            if library == "torch":
                held.append(torch.empty(size, dtype=torch.uint8))
            else:
                held.append(numpy.empty(size, dtype=numpy.uint8))
            seen.append("fits")
        except Exception as error:
            seen.append("out of memory" if is_out_of_memory(error) else repr(error))
        held.clear()
print(json.dumps(seen))
"""


def run_limited(*arguments: int) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_limit_is_between_what_fits_and_what_does_not() -> None:
    seen = run_limited(512 * MIB, 400 * MIB, 600 * MIB, 400 * MIB)
    assert seen == ["fits", "out of memory", "fits"] * 2


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("std::bad_alloc"),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory."),
    ],
    ids=str,
)
def test_out_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        OSError(errno.ENOSPC, "No space left on device"),
        KeyError("memory"),
    ],
    ids=str,
)
def test_other_errors(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_meter_counts_from_where_it_was_made() -> None:
    meter = MemoryMeter()
    before = meter.used_bytes()
    held = bytearray(os.urandom(1)) * (64 * MIB)
    assert meter.used_bytes() - before > 48 * MIB
    assert len(held) == 64 * MIB
