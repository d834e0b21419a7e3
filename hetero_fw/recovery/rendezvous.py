"""A rendezvous in which nothing is left to find out: the plan says who is which node."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from typing_extensions import override

BACKEND = "hetero_planned"


class PlannedRendezvous(RendezvousHandler):
    """Joins the nodes of one attempt through the supervisor's store.

    The stock c10d rendezvous negotiates ranks anew, with random delays and cached state; that is
    a second of every restart, and ranks come out in another order, which changes the order of
    floating-point sums. Here the node's rank is given and there is nothing to wait for.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._host, self._port = parse_rendezvous_endpoint(parameters.endpoint, -1)
        self._run_id = parameters.run_id
        self._num_nodes = parameters.max_nodes
        self._rank = int(parameters.get("rank"))
        self._timeout = timedelta(seconds=float(parameters.get("timeout")))

    @override
    def get_backend(self) -> str:
        return BACKEND

    @property
    @override
    def use_agent_store(self) -> bool:
        return True

    @override
    def next_rendezvous(self) -> RendezvousInfo:
        store = dist.TCPStore(self._host, self._port, is_master=False, timeout=self._timeout)
        return RendezvousInfo(
            dist.PrefixStore(self._run_id, store),
            self._rank,
            self._num_nodes,
            RendezvousStoreInfo(self._host, self._port),
        )

    @override
    def is_closed(self) -> bool:
        return False

    @override
    def set_closed(self) -> None:
        """Nobody joins later, so there is nothing to close."""

    @override
    def num_nodes_waiting(self) -> int:
        return 0

    @override
    def get_run_id(self) -> str:
        return self._run_id

    @override
    def shutdown(self) -> bool:
        return True


def register() -> None:
    """Make the backend known to torch elastic; harmless when called twice."""
    if BACKEND not in rendezvous_handler_registry._registry:
        rendezvous_handler_registry.register(BACKEND, PlannedRendezvous)
