"""On which other nodes a node's part of a checkpoint is kept as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_fw.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ReplicaNode:
    """What counts when copies are placed.

    Attributes:
        name: of the node, unlike any other's.
        group: hardware group; nodes of one group tend to fail together (one rack, one spot market).
        num_bytes: of one checkpoint that the node's own ranks write.
        free_bytes: room for checkpoints, its own among them.
        link_bytes_per_s: of its link to other nodes.
    """

    name: str
    group: str
    num_bytes: int
    free_bytes: int
    link_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class ReplicaPlan:
    """For each node the other nodes that hold a copy of its part, and why those."""

    peers: Mapping[str, tuple[str, ...]]
    reason: str


def plan_replicas(
    nodes: Sequence[ReplicaNode], min_replica_size: int, *, num_kept: int
) -> ReplicaPlan:
    """Choose for every node `min_replica_size - 1` others.

    Each part lies on that many nodes in all, so it survives the loss of all but one of them. Nodes
    with the largest parts choose first. A copy goes to another hardware group if one has room, to
    the node that has taken the fewest copies for the speed of its link, and never to a node where
    `num_kept` checkpoints, its own parts and the copies together, would not fit.

    Raises:
        ConfigError: there are too few nodes, or too little room on them.
    """
    if min_replica_size > len(nodes):
        raise ConfigError(
            f"ckpt.min_replica_size={min_replica_size} needs as many nodes, but there are "
            f"{len(nodes)}. Lower it, or leave ckpt.tiers.local out."
        )
    taken_bytes = {node.name: node.num_bytes for node in nodes}
    num_copies = dict.fromkeys(taken_bytes, 0)
    peers: dict[str, tuple[str, ...]] = {}
    for node in sorted(nodes, key=lambda node: (-node.num_bytes, node.name)):
        chosen: list[ReplicaNode] = []
        for _ in range(min_replica_size - 1):
            fits = [
                other
                for other in nodes
                if other is not node
                and other not in chosen
                and num_kept * (taken_bytes[other.name] + node.num_bytes) <= other.free_bytes
            ]
            if not fits:
                raise ConfigError(_no_room(node, nodes, taken_bytes, num_kept))
            groups = {node.group, *(other.group for other in chosen)}
            best = min(
                fits,
                key=lambda other: (
                    other.group in groups,
                    (num_copies[other.name] + 1) / other.link_bytes_per_s,
                    other.name,
                ),
            )
            chosen.append(best)
            taken_bytes[best.name] += node.num_bytes
            num_copies[best.name] += 1
        peers[node.name] = tuple(other.name for other in chosen)
    return ReplicaPlan(peers=peers, reason=_reason(nodes, peers, min_replica_size))


def _no_room(
    node: ReplicaNode,
    nodes: Sequence[ReplicaNode],
    taken_bytes: Mapping[str, int],
    num_kept: int,
) -> str:
    rooms = ", ".join(
        f"{other.name} has {other.free_bytes / 1e9:.3g} GB and needs "
        f"{num_kept * (taken_bytes[other.name] + node.num_bytes) / 1e9:.3g} GB"
        for other in nodes
        if other is not node
    )
    return (
        f"ckpt.tiers.local: no other node has room for copies of the part of {node.name} "
        f"({num_kept} x {node.num_bytes / 1e9:.3g} GB): {rooms}. Choose a larger directory, or "
        "lower ckpt.min_replica_size."
    )


def _reason(
    nodes: Sequence[ReplicaNode], peers: Mapping[str, tuple[str, ...]], min_replica_size: int
) -> str:
    if min_replica_size == 1:
        return "every part on its own node alone"
    group_of = {node.name: node.group for node in nodes}
    num_across = sum(
        any(group_of[peer] != group_of[name] for peer in names) for name, names in peers.items()
    )
    return (
        f"every part on {min_replica_size} nodes, {num_across} of {len(nodes)} in another hardware "
        "group as well"
    )
