"""Host memory that a save copies the tensors to, so that training can change them again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from hetero_fw.checkpoint.finiteness import flaw_of
from hetero_fw.checkpoint.host_memory import HostMemory
from hetero_fw.checkpoint.shard_layout import ShardLayout


@dataclass(frozen=True, kw_only=True)
class StagingCopy:
    """One chunk of a live tensor and its place in the staging memory."""

    fqn: str
    source: torch.Tensor
    target: torch.Tensor


class StagingBuffer:
    """The bytes of one rank's shard file, in memory that every save reuses.

    The memory belongs to the writer from the end of the copies until the writer is done with it;
    the caller does not copy before that.

    Args:
        is_shared: whether another process will read it.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        self._is_shared = is_shared
        self._layout: ShardLayout | None = None
        self._views: tuple[torch.Tensor, ...] = ()
        self._stream: torch.cuda.Stream | None = None
        self.memory: HostMemory | None = None

    def prepare(self, layout: ShardLayout, tensors: Mapping[str, torch.Tensor]) -> None:
        """Get the memory for `layout`; nothing to do if the last save had the same."""
        devices = [tensor.device for tensor in tensors.values() if tensor.is_cuda]
        if layout is self._layout and self.memory is not None:
            return
        if self.memory is not None:
            self._views = ()
            self.memory.close()
        self.memory = HostMemory(
            max(1, layout.size), is_shared=self._is_shared, is_pinned=bool(devices)
        )
        buffer = self.memory.tensor
        self._views = tuple(
            buffer[slot.byte_offset : slot.byte_offset + slot.length]
            .view(slot.dtype)
            .view(slot.sizes)
            for slot in layout.slots
        )
        self._layout = layout
        if devices and self._stream is None:
            # Named, because each thread has a current device of its own.
            self._stream = torch.cuda.Stream(devices[0])

    def resolve(
        self,
        layout: ShardLayout,
        planner: DefaultSavePlanner,
        tensors: Mapping[str, torch.Tensor],
    ) -> list[StagingCopy]:
        """This rank's chunks of `tensors`, after `prepare`. Nothing is copied yet."""
        planner.set_up_planner(dict(tensors))
        copies = []
        with torch.no_grad():
            for slot, view in zip(layout.slots, self._views, strict=True):
                chunk = planner.resolve_data(slot.item)
                assert isinstance(chunk, torch.Tensor)
                copies.append(StagingCopy(fqn=slot.fqn, source=chunk, target=view))
        planner.set_up_planner({})  # keeps no tensor alive between saves
        return copies

    def mark(self) -> torch.cuda.Event | None:
        """A mark in the device's work: copies wait for what was asked of the device before it."""
        return (
            torch.cuda.current_stream(self._stream.device).record_event()
            if self._stream is not None
            else None
        )

    def copy(self, copies: Sequence[StagingCopy], after: torch.cuda.Event | None) -> None:
        """Copy the chunks and wait until they are there; in any thread.

        On CUDA the copies run on a stream of their own, beside the kernels of the next step, and
        the thread is left at their device.
        """
        if self._stream is not None:
            # A thread begins at device 0. To go back there after the copies makes a context, some
            # 0.5 GB of it, for every rank whose device is another.
            torch.cuda.set_device(self._stream.device)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            if self._stream is not None and after is not None:
                self._stream.wait_event(after)
            for item in copies:
                item.target.copy_(item.source, non_blocking=self._stream is not None)
            if self._stream is not None:
                self._stream.synchronize()


def first_non_finite(
    content: memoryview, layout: ShardLayout, may_be_infinite: Collection[str]
) -> str | None:
    """Name of a staged tensor with a NaN, or an infinity if not in `may_be_infinite`."""
    if not layout.slots:
        return None
    buffer = torch.frombuffer(content, dtype=torch.uint8)
    for slot in layout.slots:
        view = buffer[slot.byte_offset : slot.byte_offset + slot.length].view(slot.dtype)
        if flaw_of(view, allows_infinity=slot.fqn in may_be_infinite) is not None:
            return slot.fqn
    return None
