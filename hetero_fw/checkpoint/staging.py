"""Host memory that a save copies the tensors to, so that training can change them at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from hetero_fw.checkpoint.shard_layout import ShardLayout, Slot

# Large enough to keep the per-call cost out of sight, small enough to need no large scratch.
FINITE_CHECK_ELEMENTS = 2**22


class StagingBuffer:
    """The bytes of one rank's shard file, in memory that every save reuses.

    The buffer belongs to the writer from the end of `stage` until the writer is done with
    `content`; the caller does not stage before that.
    """

    def __init__(self) -> None:
        self._layout: ShardLayout | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._views: tuple[torch.Tensor, ...] = ()

    @property
    def content(self) -> memoryview:
        """The staged bytes of the whole shard file."""
        return self._buffer.numpy().data

    def stage(
        self,
        layout: ShardLayout,
        planner: DefaultSavePlanner,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """Copy this rank's chunks of `tensors`. Blocks until the copies are complete."""
        self.prepare(layout, tensors)
        is_cuda = self._buffer.is_pinned()
        planner.set_up_planner(dict(tensors))
        with torch.no_grad():
            for slot, view in zip(layout.slots, self._views, strict=True):
                chunk = planner.resolve_data(slot.item)
                assert isinstance(chunk, torch.Tensor)
                view.copy_(chunk, non_blocking=is_cuda)
        if is_cuda:
            torch.cuda.current_stream().synchronize()
        planner.set_up_planner({})  # keeps no tensor alive between saves

    def prepare(self, layout: ShardLayout, tensors: Mapping[str, torch.Tensor]) -> None:
        """Get the memory for `layout`; nothing to do if the last save had the same."""
        pin_memory = any(tensor.is_cuda for tensor in tensors.values())
        if layout is self._layout and self._buffer.is_pinned() == pin_memory:
            return
        self._views = ()
        self._buffer = torch.empty(layout.size, dtype=torch.uint8, pin_memory=pin_memory)
        # The gaps between chunks are written and hashed too. It also maps every page, which
        # would otherwise be paid for by the first copy.
        self._buffer.zero_()
        self._views = tuple(
            self._buffer[slot.byte_offset : slot.byte_offset + slot.length]
            .view(slot.dtype)
            .view(slot.sizes)
            for slot in layout.slots
        )
        self._layout = layout

    def first_non_finite(self, may_be_infinite: Collection[str]) -> str | None:
        """Name of a staged tensor with a NaN, or an infinity if not in `may_be_infinite`."""
        assert self._layout is not None
        for slot, view in zip(self._layout.slots, self._views, strict=True):
            if not _is_finite(slot, view, allows_infinity=slot.fqn in may_be_infinite):
                return slot.fqn
        return None


def _is_finite(slot: Slot, view: torch.Tensor, *, allows_infinity: bool) -> bool:
    if slot.dtype.is_complex:
        view = torch.view_as_real(view)
    elif not slot.dtype.is_floating_point:
        return True
    for piece in _pieces(view.reshape(-1)):
        # One pass without a scratch tensor: a NaN comes out of both, an infinity out of one.
        extremes = torch.stack(torch.aminmax(piece))
        if bool(extremes.isnan().any()) or not (allows_infinity or bool(extremes.isfinite().all())):
            return False
    return True


def _pieces(flat: torch.Tensor) -> Sequence[torch.Tensor]:
    pieces = torch.split(flat, FINITE_CHECK_ELEMENTS)
    # The 8-bit dtypes have no reductions of their own.
    return [piece.float() for piece in pieces] if flat.dtype.itemsize == 1 else pieces
