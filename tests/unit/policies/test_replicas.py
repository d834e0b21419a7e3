from __future__ import annotations

import pytest

from hetero_fw.policies import ReplicaNode, plan_replicas


def node(name: str, group: str) -> ReplicaNode:
    return ReplicaNode(name=name, group=group, num_bytes=1, free_bytes=100, link_bytes_per_s=1.0)


@pytest.mark.parametrize(
    ("min_replica_size", "told"),
    [
        (1, "every part on its own node alone"),
        (2, "every part on 2 nodes, 2 of 2 in another hardware group as well"),
    ],
)
def test_the_reason_says_on_how_many_nodes(min_replica_size: int, told: str) -> None:
    nodes = [node("a", "fast"), node("b", "slow")]
    assert plan_replicas(nodes, min_replica_size, num_kept=3).reason == told
