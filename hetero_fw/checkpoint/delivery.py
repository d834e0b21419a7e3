"""Hand verified bytes from the ranks that have read them to the tensors that want them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hetero_fw.checkpoint.buffer import Buffer
from hetero_fw.checkpoint.manifest import Manifest
from hetero_fw.checkpoint.ranks import Ranks
from hetero_fw.checkpoint.spans import ChunkKey
from hetero_fw.checkpoint.transfers import Need, Part, plan_windows

# Small enough to stay in cache on its way, large enough for a socket's full speed.
WINDOW_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class ChunkBox:
    """A part of a chunk that a rank wants."""

    key: ChunkKey
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Want:
    """A box, and the way to the tensor that it goes to.

    Attributes:
        target: gives the view to copy into, of the box's lengths.
    """

    box: ChunkBox
    target: Callable[[], torch.Tensor]


class Delivery:
    """Brings chunks to the tensors of all ranks, as they come.

    Args:
        wants: of this rank.
        boxes: of all ranks, in rank order; those of this rank in the order of `wants`.
    """

    def __init__(
        self,
        ranks: Ranks,
        manifest: Manifest,
        wants: Sequence[Want],
        boxes: Sequence[Sequence[ChunkBox]],
    ) -> None:
        self._ranks = ranks
        self._manifest = manifest
        self._wants = wants
        self._takers: dict[ChunkKey, list[tuple[int, int, ChunkBox]]] = {}
        for rank, theirs in enumerate(boxes):
            for number, box in enumerate(theirs):
                self._takers.setdefault(box.key, []).append((rank, number, box))
        self._failure: Exception | None = None
        self._outbox = Buffer()
        self._inbox = Buffer()

    def stays(self, key: ChunkKey, owner: int) -> bool:
        """Whether no other rank than `owner` wants anything of a chunk."""
        return all(rank == owner for rank, _, _ in self._takers.get(key, ()))

    def copy_here(self, key: ChunkKey, content: torch.Tensor) -> None:
        """Copy what this rank wants of a chunk that it has read; several threads may do so."""
        with torch.no_grad():
            for rank, number, box in self._takers.get(key, ()):
                if rank == self._ranks.rank:
                    saved = self._view(key, content)[_slices(box.offsets, box.lengths)]
                    self._copy(number, saved)

    def exchange(
        self, owners: Mapping[ChunkKey, int], contents: Mapping[ChunkKey, torch.Tensor]
    ) -> None:
        """Bring chunks to the other ranks that want something of them. All ranks call it.

        Args:
            owners: which rank has each of the chunks; the same on all ranks.
            contents: bytes of those that this rank has.
        """
        lot = _Lot(list(owners), contents, self._ranks.size)
        for chunk, (key, owner) in enumerate(owners.items()):
            for rank, number, box in self._takers.get(key, ()):
                if rank != owner:
                    lot.needs[rank].append(self._need(owner, chunk, box))
                    lot.numbers[rank].append(number)
        with torch.no_grad():
            for window in plan_windows(lot.needs, WINDOW_BYTES):
                self._exchange(window, lot)

    def finish(self) -> None:
        """All ranks call it once, after the last chunk.

        Raises:
            CheckpointError: copying failed on some rank; raised on all of them.
        """
        self._ranks.succeed_together(self._raise_failure)

    def _need(self, owner: int, chunk: int, box: ChunkBox) -> Need:
        return Need(
            owner=owner,
            chunk=chunk,
            itemsize=self._dtype(box.key).itemsize,
            offsets=box.offsets,
            lengths=box.lengths,
        )

    def _dtype(self, key: ChunkKey) -> torch.dtype:
        return self._manifest.tensors[key[0]].torch_dtype

    def _view(self, key: ChunkKey, content: torch.Tensor) -> torch.Tensor:
        fqn, index = key
        sizes = self._manifest.tensors[fqn].chunks[index].sizes
        return content.view(self._dtype(key)).view(sizes)

    def _exchange(self, window: Sequence[Part], lot: _Lot) -> None:
        size, rank = self._ranks.size, self._ranks.rank
        outgoing = sorted((p for p in window if p.source == rank), key=lambda part: part.target)
        incoming = sorted((p for p in window if p.target == rank), key=lambda part: part.source)
        send = self._pack(outgoing, lot)
        receive = self._inbox.take(sum(part.room_bytes for part in incoming))
        dist.all_to_all_single(
            receive,
            send,
            [sum(p.room_bytes for p in incoming if p.source == other) for other in range(size)],
            [sum(p.room_bytes for p in outgoing if p.target == other) for other in range(size)],
            group=self._ranks.group,
        )
        self._unpack(receive, incoming, lot)

    def _pack(self, parts: Sequence[Part], lot: _Lot) -> torch.Tensor:
        buffer = self._outbox.take(sum(part.room_bytes for part in parts))
        end = 0
        for part in parts:
            need = lot.needs[part.target][part.need]
            key = lot.keys[need.chunk]
            saved = self._view(key, lot.contents[key])
            begin = tuple(a + b for a, b in zip(need.offsets, part.start, strict=True))
            _part_of(buffer, end, part, saved.dtype).copy_(saved[_slices(begin, part.lengths)])
            end += part.room_bytes
        return buffer

    def _unpack(self, buffer: torch.Tensor, parts: Sequence[Part], lot: _Lot) -> None:
        end = 0
        for part in parts:
            number = lot.numbers[self._ranks.rank][part.need]
            dtype = self._dtype(self._wants[number].box.key)
            box = _slices(part.start, part.lengths)
            self._copy(number, _part_of(buffer, end, part, dtype), box)
            end += part.room_bytes

    def _copy(self, number: int, saved: torch.Tensor, box: tuple[slice, ...] = ()) -> None:
        """Copy; a failure waits until the other ranks have what they need from this one."""
        if self._failure is None:
            try:
                self._wants[number].target()[box].copy_(saved)
            except Exception as error:  # noqa: BLE001  # raised on all ranks in the end
                self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class _Lot:
    """Some chunks, and who needs what of them from another rank.

    Attributes:
        numbers: for each need the number of the want that it is for.
    """

    def __init__(
        self, keys: Sequence[ChunkKey], contents: Mapping[ChunkKey, torch.Tensor], size: int
    ) -> None:
        self.keys = keys
        self.contents = contents
        self.needs: list[list[Need]] = [[] for _ in range(size)]
        self.numbers: list[list[int]] = [[] for _ in range(size)]


def _part_of(buffer: torch.Tensor, start: int, part: Part, dtype: torch.dtype) -> torch.Tensor:
    return buffer[start : start + part.num_bytes].view(dtype).view(part.lengths)


def _slices(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(offsets, lengths, strict=True))
