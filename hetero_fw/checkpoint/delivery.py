"""Hand verified bytes from the ranks that hold them to the tensors that want them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from hetero_fw.checkpoint.held import HeldCheckpoint
from hetero_fw.checkpoint.manifest import ChunkEntry
from hetero_fw.checkpoint.spans import ChunkKey
from hetero_fw.checkpoint.transfers import Need, Part, plan_windows

# Small enough to stay in cache on its way, large enough for a socket's full speed.
WINDOW_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class Want:
    """A box of a chunk, and the way to the tensor that it goes to.

    Attributes:
        target: gives the view to copy into, of the box's lengths.
    """

    key: ChunkKey
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    target: Callable[[], torch.Tensor]


class Delivery:
    """One checkpoint on its way into tensors; the memory it takes is given back on the way."""

    def __init__(self, held: HeldCheckpoint) -> None:
        self._held = held
        self._rank = held.ranks.rank
        self._chunks = [(n, chunk) for n, span in enumerate(held.spans) for chunk in span.chunks]
        self._numbers = {chunk.key: number for number, (_, chunk) in enumerate(self._chunks)}
        self._here: list[Want] = []
        self._away: list[Want] = []
        self._needs: Sequence[Sequence[Need]] = ()
        self._uses: Counter[int] = Counter()
        self._failure: Exception | None = None
        self._outbox = self._inbox = torch.empty(0, dtype=torch.uint8)

    def prepare(self, wants: Sequence[Want]) -> list[Need]:
        """Take this rank's wants; returns what other ranks must send for them."""
        self._here = [want for want in wants if self._owner(want.key) == self._rank]
        self._away = [want for want in wants if self._owner(want.key) != self._rank]
        return [self._need(want) for want in self._away]

    def run(self, needs: Sequence[Sequence[Need]]) -> None:
        """Copy what is here and exchange the rest. All ranks call it, with the needs of all.

        Raises:
            CheckpointError: copying failed on some rank; raised on all of them.
        """
        self._needs = needs
        windows = plan_windows(needs, WINDOW_BYTES)
        self._count_uses(windows)
        self._outbox = _buffer(windows, lambda part: part.source == self._rank)
        self._inbox = _buffer(windows, lambda part: part.target == self._rank)
        with torch.no_grad():
            self._copy_here()
            for window in windows:
                self._exchange(window)
        self._held.contents.clear()
        self._held.ranks.succeed_together(self._raise_failure)

    def _owner(self, key: ChunkKey) -> int:
        return self._held.owners[self._chunks[self._numbers[key]][0]]

    def _need(self, want: Want) -> Need:
        return Need(
            owner=self._owner(want.key),
            chunk=self._numbers[want.key],
            itemsize=self._held.manifest.tensors[want.key[0]].torch_dtype.itemsize,
            offsets=want.offsets,
            lengths=want.lengths,
        )

    def _count_uses(self, windows: Sequence[Sequence[Part]]) -> None:
        """How often each span of this rank is needed; what nobody needs is freed at once."""
        for want in self._here:
            self._uses[self._chunks[self._numbers[want.key]][0]] += 1
        for part in (part for window in windows for part in window):
            if part.source == self._rank:
                self._uses[self._span_of(part)] += 1
        for number in list(self._held.contents):
            if not self._uses[number]:
                del self._held.contents[number]

    def _copy_here(self) -> None:
        for want in sorted(self._here, key=lambda want: self._numbers[want.key]):
            number = self._numbers[want.key]
            saved = self._chunk(number)
            self._try(want.target, saved[_slices(want.offsets, want.lengths)])
            del saved
            self._used(self._chunks[number][0])

    def _exchange(self, window: Sequence[Part]) -> None:
        size = self._held.ranks.size
        outgoing = sorted(
            (part for part in window if part.source == self._rank), key=lambda part: part.target
        )
        incoming = [part for part in window if part.target == self._rank]
        send = self._pack(outgoing)
        receive = self._inbox[: sum(part.room_bytes for part in incoming)]
        dist.all_to_all_single(
            receive,
            send,
            [sum(p.room_bytes for p in incoming if p.source == rank) for rank in range(size)],
            [sum(p.room_bytes for p in outgoing if p.target == rank) for rank in range(size)],
            group=self._held.ranks.group,
        )
        self._unpack(receive, sorted(incoming, key=lambda part: part.source))

    def _pack(self, parts: Sequence[Part]) -> torch.Tensor:
        buffer = self._outbox[: sum(part.room_bytes for part in parts)]
        end = 0
        for part in parts:
            need = self._needs[part.target][part.need]
            saved = self._chunk(need.chunk)
            begin = tuple(a + b for a, b in zip(need.offsets, part.start, strict=True))
            _part_of(buffer, end, part, saved.dtype).copy_(saved[_slices(begin, part.lengths)])
            end += part.room_bytes
            del saved
            self._used(self._span_of(part))
        return buffer

    def _unpack(self, buffer: torch.Tensor, parts: Sequence[Part]) -> None:
        end = 0
        for part in parts:
            want = self._away[part.need]
            dtype = self._held.manifest.tensors[want.key[0]].torch_dtype
            box = _slices(part.start, part.lengths)
            self._try(want.target, _part_of(buffer, end, part, dtype), box)
            end += part.room_bytes

    def _try(
        self,
        target: Callable[[], torch.Tensor],
        saved: torch.Tensor,
        box: tuple[slice, ...] = (),
    ) -> None:
        """Copy; a failure waits until the other ranks have what they need from this one."""
        if self._failure is None:
            try:
                target()[box].copy_(saved)
            except Exception as error:  # noqa: BLE001  # raised on all ranks in the end
                self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _span_of(self, part: Part) -> int:
        return self._chunks[self._needs[part.target][part.need].chunk][0]

    def _chunk(self, number: int) -> torch.Tensor:
        """A chunk that this rank holds, as a tensor."""
        span, chunk = self._chunks[number]
        entry: ChunkEntry = chunk.entry
        stored = self._held.contents[span][chunk.start : chunk.start + entry.length]
        dtype = self._held.manifest.tensors[chunk.key[0]].torch_dtype
        return stored.view(dtype).view(entry.sizes)

    def _used(self, span: int) -> None:
        self._uses[span] -= 1
        if not self._uses[span]:
            del self._held.contents[span]


def _buffer(windows: Sequence[Sequence[Part]], is_in: Callable[[Part], bool]) -> torch.Tensor:
    """Memory for the largest of the windows; used again for each, so that it is touched once."""
    sizes = (sum(part.room_bytes for part in window if is_in(part)) for window in windows)
    return torch.from_numpy(np.empty(max(sizes, default=0), dtype=np.uint8))


def _part_of(buffer: torch.Tensor, start: int, part: Part, dtype: torch.dtype) -> torch.Tensor:
    return buffer[start : start + part.num_bytes].view(dtype).view(part.lengths)


def _slices(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(offsets, lengths, strict=True))
