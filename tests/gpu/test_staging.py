"""Copies from a device: beside its kernels, and exactly what stood there at the mark."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hetero_fw.checkpoint import load_checkpoint
from hetero_fw.checkpoint.host_memory import HostMemory
from hetero_fw.checkpoint.staging import StagingBuffer, StagingCopy
from tests.unit.checkpoint.examples import make_saver, save, weights

pytestmark = pytest.mark.gpu

SIZE_BYTES = 2**28
# Of a kernel that only waits: some 0.5 s, while 256 MiB take some 10 ms.
LONG_CYCLES = 10**9


@pytest.fixture(params=[True, False], ids=["shared", "private"])
def memory(request: pytest.FixtureRequest) -> Iterator[HostMemory]:
    memory = HostMemory(SIZE_BYTES, is_shared=request.param, is_pinned=True)
    yield memory
    memory.close()


def copier(source: torch.Tensor, memory: HostMemory) -> tuple[StagingBuffer, list[StagingCopy]]:
    buffer = StagingBuffer()
    buffer._stream = torch.cuda.Stream(source.device)
    return buffer, [StagingCopy(fqn="weight", source=source, target=memory.tensor)]


TAKES_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")


def test_memory_is_page_locked(memory: HostMemory) -> None:
    assert memory.is_pinned
    assert memory.tensor.is_pinned()


def test_a_refusal_to_page_lock_is_no_error_of_the_next_kernel(memory: HostMemory) -> None:
    memory._pin()  # it is page-locked already
    is_pinned_again, memory.is_pinned = memory.is_pinned, True  # so that `close` undoes the first
    assert not is_pinned_again
    assert float(torch.ones(1, device="cuda").add_(1.0)) == 2.0


@pytest.mark.parametrize("index", [0, pytest.param(1, marks=TAKES_TWO)])
def test_a_thread_that_copies_is_left_at_the_device(memory: HostMemory, index: int) -> None:
    source = torch.full((SIZE_BYTES,), 5, dtype=torch.uint8, device=torch.device("cuda", index))
    buffer, copies = copier(source, memory)
    mark = buffer.mark()
    devices: list[int] = []

    def copy() -> None:
        buffer.copy(copies, mark)
        devices.append(torch.cuda.current_device())

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join(10.0)
    assert devices == [index]
    assert bool((memory.tensor == 5).all())


def test_copies_run_beside_the_kernels_of_the_next_step(memory: HostMemory) -> None:
    source = torch.full((SIZE_BYTES,), 7, dtype=torch.uint8, device="cuda")
    buffer, copies = copier(source, memory)
    mark = buffer.mark()
    torch.cuda._sleep(LONG_CYCLES)
    has_ended = torch.cuda.Event()
    has_ended.record()
    buffer.copy(copies, mark)
    assert not has_ended.query(), "the copy has waited for a kernel that came after its mark"
    assert bool((memory.tensor == 7).all())
    torch.cuda.synchronize()


def test_copies_wait_for_what_came_before_the_mark(memory: HostMemory) -> None:
    source = torch.zeros(SIZE_BYTES, dtype=torch.uint8, device="cuda")
    buffer, copies = copier(source, memory)
    torch.cuda._sleep(LONG_CYCLES)
    source.fill_(9)
    buffer.copy(copies, buffer.mark())
    assert bool((memory.tensor == 9).all())


def test_a_save_from_the_device_reads_back_there(tmp_path: Path) -> None:
    saver = make_saver(tmp_path, overlaps_staging=True)
    for step in (1, 2):  # the second one in the memory of the first
        placed = {fqn: tensor.cuda() for fqn, tensor in weights(step).items()}
        outcome = save(saver, step, placed)
        assert outcome.ok, outcome.reason
        assert outcome.path is not None
        loaded = {fqn: torch.zeros_like(tensor) for fqn, tensor in placed.items()}
        assert load_checkpoint(outcome.path, loaded) == {"step": step}
        assert all(torch.equal(loaded[fqn], tensor) for fqn, tensor in placed.items())
    assert saver.close(10.0)
