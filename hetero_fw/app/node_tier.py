"""Directories of the nodes themselves as a tier: who keeps what, where copies go, when it ends."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from hetero_fw.app.context import RankContext
from hetero_fw.app.planner import cluster_of
from hetero_fw.app.storage_settings import local_directory
from hetero_fw.checkpoint import (
    AttemptDirectories,
    NodePlace,
    NodeRoles,
    NodeTier,
    shard_file_name,
)
from hetero_fw.policies import ReplicaNode, ReplicaPlan, plan_replicas
from hetero_fw.recovery.store import LOOPBACK

# Two that are kept, and the one that is being written.
NUM_KEPT = 3


def node_directory(context: RankContext) -> Path | None:
    """This node's directory for checkpoints of the run; None without such a tier."""
    local = local_directory(context.cfg, context.run_dir.name)
    return None if local is None else local / context.plan.ranks[context.rank].node


def is_leader(context: RankContext) -> bool:
    """Whether this rank speaks for its node."""
    return context.rank in context.plan.first_ranks.values()


def build_node_tier(context: RankContext, checkpoint_bytes: int) -> NodeTier | None:
    """The tier as this rank sees it; all ranks call this.

    Returns:
        None without such a tier, also where some node could not claim its directory.

    Raises:
        ConfigError: there is no room for the copies.
    """
    root = node_directory(context)
    if root is None or not _is_claimed_everywhere(context, root):
        return None
    own = context.plan.ranks[context.rank]
    replicas = _plan_replicas(context, root, checkpoint_bytes)
    if context.rank == 0:
        print(f"checkpoints in {root.parent}: {replicas.reason}", flush=True)
    sources = {own.node, *(node for node, peers in replicas.peers.items() if own.node in peers)}
    return NodeTier(
        place=NodePlace(
            directories=AttemptDirectories(root=root, attempt=context.attempt),
            node=own.node,
            files=tuple(
                shard_file_name(rank.rank) for rank in context.plan.ranks if rank.node in sources
            ),
        ),
        roles=NodeRoles(
            leaders=tuple(context.plan.first_ranks.values()),
            receivers=_receivers(context, replicas.peers[own.node]),
            host=LOOPBACK,
        ),
    )


def _is_claimed_everywhere(context: RankContext, root: Path) -> bool:
    own = AttemptDirectories(root=root, attempt=context.attempt)
    claimed = context.exchange.all_gather([float(own.staging.is_dir())])
    return all(row[0] for row in claimed)


def clear_node_directory(context: RankContext, is_stored: bool) -> None:
    """When training is over: give the room back, unless the storage lacks the last step."""
    root = node_directory(context)
    if root is None or not is_stored or not is_leader(context):
        return
    shutil.rmtree(root, ignore_errors=True)
    try:
        root.parent.rmdir()
    except OSError:
        return  # another node's directory is still there


def _receivers(context: RankContext, peers: Sequence[str]) -> tuple[int, ...]:
    """One rank of each peer; the ranks of a node spread over those of the peer."""
    local_rank = context.plan.ranks[context.rank].local_rank
    found = []
    for peer in peers:
        ranks = [rank.rank for rank in context.plan.ranks if rank.node == peer]
        found.append(ranks[local_rank % len(ranks)])
    return tuple(found)


def _plan_replicas(context: RankContext, root: Path, checkpoint_bytes: int) -> ReplicaPlan:
    plan = context.plan
    free = [int(row[0]) for row in context.exchange.all_gather([float(_free_bytes(root))])]
    links = {node.name: node.inter_link for node in cluster_of(context.cfg).nodes}
    nodes = []
    for leader in plan.first_ranks.values():
        rank = plan.ranks[leader]
        num_ranks = sum(other.node == rank.node for other in plan.ranks)
        nodes.append(
            ReplicaNode(
                name=rank.node,
                group=rank.group,
                num_bytes=checkpoint_bytes * num_ranks // plan.world_size,
                free_bytes=free[leader],
                link_bytes_per_s=links[rank.node].bytes_per_s,
            )
        )
    return plan_replicas(nodes, context.cfg.ckpt.min_replica_size, num_kept=NUM_KEPT)


def _free_bytes(root: Path) -> int:
    return shutil.disk_usage(root).free
