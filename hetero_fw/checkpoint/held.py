"""A checkpoint whose every byte is in the memory of some rank, verified, and nowhere else yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hetero_fw.checkpoint.manifest import Manifest
from hetero_fw.checkpoint.ranks import Ranks
from hetero_fw.checkpoint.spans import Span


@dataclass(kw_only=True)
class HeldCheckpoint:
    """What all ranks together have read. Every rank holds a part; `fill_from` spends it.

    Attributes:
        path: the directory, or the nearest of several, for messages.
        sources: the directories that bytes came from.
        tiers: names of the tiers of these.
        bytes_read: bytes of chunks that all ranks together read, failed tries included.
        read_s: time that the slowest rank took.
        owners: for each span the rank that holds it.
        contents: this rank's spans by number.
    """

    path: str
    manifest: Manifest
    sources: tuple[str, ...]
    tiers: tuple[str, ...]
    bytes_read: int
    read_s: float
    ranks: Ranks
    spans: tuple[Span, ...]
    owners: tuple[int, ...]
    contents: dict[int, torch.Tensor]

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors that were read."""
        return sum(span.num_chunk_bytes for span in self.spans)
