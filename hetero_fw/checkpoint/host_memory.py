"""Host memory that is filled over and over, and that another process can read."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os

import torch

logger = logging.getLogger(__name__)


class HostMemory:
    """`size` bytes with every page in place, as a tensor of uint8.

    Args:
        size: in bytes, at least 1.
        is_shared: whether `fd` can be handed to another process. The memory has no name in any
            file system: it is gone with the last process that maps it, however that ends.
        is_pinned: page-locked for CUDA, so that copies from the device run beside its kernels.
    """

    def __init__(self, size: int, *, is_shared: bool, is_pinned: bool) -> None:
        self.size = size
        self.is_pinned = False
        self.fd: int | None = None
        if is_shared:
            self.fd = os.memfd_create("hetero_fw-staging", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size)
        else:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # fewer page faults where the kernel has huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        # Maps every page, which the first copy would pay for otherwise, and fills the gaps
        # between chunks, which are written and hashed too.
        self.tensor.zero_()
        if is_pinned:
            self._pin()

    @property
    def content(self) -> memoryview:
        return memoryview(self._map)

    def close(self) -> None:
        """Give the memory back as soon as no view of it is left."""
        if self.is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
            self.is_pinned = False
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def _pin(self) -> None:
        cudart = torch.cuda.cudart()
        status = int(cudart.cudaHostRegister(self.tensor.data_ptr(), self.size, 0))
        self.is_pinned = status == 0
        if not self.is_pinned:
            # Copies are then slower and hold the device up, but right.
            logger.warning("cannot page-lock %d bytes of host memory: %d", self.size, status)
            _forget_refusal()


def _forget_refusal() -> None:
    """Take the error away that a failed call has left pending in this thread.

    Whatever launches a kernel next would raise it as its own. PyTorch has no name for
    cudaGetLastError, but calls it after each launch, so a kernel that nobody needs gets it.
    """
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device="cuda").fill_(0.0)
