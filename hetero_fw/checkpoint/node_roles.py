"""Who does what in a tier of directories of the nodes themselves, and what they tell each other."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_fw.checkpoint.node_place import NodePlace

MANIFEST_TOPIC = "manifest"


def address_topic(rank: int) -> str:
    """Under which `rank` tells where its writer takes copies."""
    return f"address/{rank}"


def published_topic(rank: int) -> str:
    """Under which `rank` tells whether its node has published."""
    return f"published/{rank}"


@dataclass(frozen=True, kw_only=True)
class NodeRoles:
    """Who does what in a tier of directories of the nodes themselves.

    Attributes:
        leaders: one rank of each node, which publishes there; rank 0 is one of them.
        receivers: ranks of other nodes whose writers take copies of this rank's part.
        host: address at which this rank's writer takes copies.
    """

    leaders: tuple[int, ...]
    receivers: tuple[int, ...]
    host: str

    @property
    def topics(self) -> tuple[str, ...]:
        """What ranks tell each other in a save, at most."""
        ranks = range(max((*self.leaders, *self.receivers)) + 1)
        return (MANIFEST_TOPIC, *map(address_topic, ranks), *map(published_topic, self.leaders))


@dataclass(frozen=True, kw_only=True)
class NodeTier:
    """The node directories of this attempt, and who does what about them."""

    place: NodePlace
    roles: NodeRoles
