"""Memory for bytes on their way."""

from __future__ import annotations

import numpy as np
import torch


class Buffer:
    """Bytes that are used again and again: memory costs most when it is touched first."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """The first `size` bytes; what was taken before is given back by that."""
        if size > len(self._memory):
            # numpy asks for huge pages, which cost a fraction of the page faults; torch does not.
            self._memory = torch.from_numpy(np.empty(size, dtype=np.uint8))
        return self._memory[:size]
