"""The run's TCP store, by which agents and ranks meet."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class StoreAddress:
    """Where the store listens. The supervisor hosts it, so it outlives every agent and rank."""

    host: str
    port: int

    def connect(self, attempt: int, timeout_s: float) -> dist.Store:
        """A view of the store that holds this attempt's keys only.

        Keys of an earlier attempt name processes that are dead; reading them is what makes a
        stock restart fail (https://github.com/pytorch/pytorch/issues/135712).
        """
        store = dist.TCPStore(
            self.host, self.port, is_master=False, timeout=timedelta(seconds=timeout_s)
        )
        return dist.PrefixStore(f"attempt{attempt}", store)
