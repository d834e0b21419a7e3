from __future__ import annotations

from collections.abc import Mapping

import pytest

from hetero_fw.errors import ConfigError
from hetero_fw.policies import ReplicaNode, plan_replicas


def node(
    name: str,
    group: str,
    *,
    num_bytes: int = 1,
    free_bytes: int = 100,
    link_bytes_per_s: float = 1.0,
) -> ReplicaNode:
    return ReplicaNode(
        name=name,
        group=group,
        num_bytes=num_bytes,
        free_bytes=free_bytes,
        link_bytes_per_s=link_bytes_per_s,
    )


def peers(
    nodes: list[ReplicaNode], min_replica_size: int = 2, *, num_kept: int = 1
) -> Mapping[str, tuple[str, ...]]:
    return plan_replicas(nodes, min_replica_size, num_kept=num_kept).peers


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


def test_another_group_comes_before_a_better_link_and_fewer_copies() -> None:
    # The names and the links speak for the own group, and so do the copies that z takes.
    nodes = [
        *(node(name, "fast", link_bytes_per_s=9.0) for name in ("a", "b", "c")),
        node("z", "slow"),
    ]
    plan = plan_replicas(nodes, 2, num_kept=1)
    assert plan.peers == {"a": ("z",), "b": ("z",), "c": ("z",), "z": ("a",)}
    assert "4 of 4 in another hardware group" in plan.reason


def test_a_second_copy_goes_to_a_third_group() -> None:
    nodes = [
        node("a", "fast"),
        node("b", "slow", link_bytes_per_s=9.0),
        node("c", "slow", link_bytes_per_s=9.0),
        node("z", "spot"),
    ]
    assert peers(nodes, 3)["a"] == ("b", "z")


def test_where_no_other_group_has_room_the_own_one_will_do() -> None:
    nodes = [node("a", "fast"), node("b", "fast"), node("y", "slow", free_bytes=1)]
    nodes.append(node("z", "slow", free_bytes=1))
    plan = plan_replicas(nodes, 2, num_kept=1)
    assert (plan.peers["a"], plan.peers["b"]) == (("b",), ("a",))
    assert "2 of 4 in another hardware group" in plan.reason


def test_a_node_without_the_memory_is_passed_over() -> None:
    # b is first by name and has the best link; three checkpoints of two parts are six bytes.
    nodes = [
        node("a", "fast"),
        node("b", "slow", free_bytes=5, link_bytes_per_s=9.0),
        node("c", "slow", free_bytes=6),
        node("d", "slow", free_bytes=100, link_bytes_per_s=0.1),
    ]
    assert peers(nodes, num_kept=3)["a"] == ("c",)


def test_memory_that_earlier_copies_take_is_no_longer_there() -> None:
    # x has the better link, but room for its own part and two copies alone.
    nodes = [
        *(node(name, "fast") for name in ("a", "b", "c")),
        node("x", "slow", free_bytes=6, link_bytes_per_s=9.0),
        node("y", "slow", free_bytes=100, link_bytes_per_s=0.1),
    ]
    found = peers(nodes, num_kept=2)
    assert [found[name] for name in ("a", "b", "c")] == [("x",), ("x",), ("y",)]


def test_the_largest_part_is_placed_while_there_is_room_for_it() -> None:
    # Only x can take the part of c, and no other part besides.
    nodes = [
        node("a", "fast"),
        node("b", "fast"),
        node("c", "fast", num_bytes=5),
        node("x", "slow", free_bytes=6, link_bytes_per_s=9.0),
        node("y", "slow", free_bytes=4),
    ]
    found = peers(nodes)
    assert [found[name] for name in ("a", "b", "c")] == [("y",), ("y",), ("x",)]


def test_a_better_link_comes_before_the_name() -> None:
    nodes = [
        node("a", "fast"),
        node("b", "slow", link_bytes_per_s=1.0),
        node("c", "slow", link_bytes_per_s=3.0),
        node("d", "slow", link_bytes_per_s=2.0),
    ]
    assert peers(nodes)["a"] == ("c",)


def test_copies_are_spread_by_the_speed_of_the_links() -> None:
    # A third copy over the link of x would take longer than the first over that of y.
    nodes = [
        *(node(name, "fast") for name in ("a", "b", "c", "d")),
        node("x", "slow", link_bytes_per_s=2.5),
        node("y", "slow", link_bytes_per_s=1.0),
    ]
    found = peers(nodes)
    assert [found[name] for name in ("a", "b", "c", "d")] == [("x",), ("x",), ("y",), ("x",)]


def test_no_copy_lies_on_its_own_node_or_twice_on_another() -> None:
    nodes = [node(name, "fast", link_bytes_per_s=float(i)) for i, name in enumerate("abcd", 1)]
    found = peers(nodes, 4)
    assert {name: sorted(others) for name, others in found.items()} == {
        name: [other for other in "abcd" if other != name] for name in "abcd"
    }


def test_no_room_is_told_with_the_numbers() -> None:
    nodes = [node("a", "fast", num_bytes=2 * 10**9, free_bytes=10**10)]
    nodes += [node(name, "slow", free_bytes=10**9) for name in ("x", "y", "z")]
    with pytest.raises(ConfigError) as raised:
        peers(nodes, num_kept=3)
    assert "no other node has room for copies of the part of a (3 x 2 GB)" in str(raised.value)
    assert "z has 1 GB and needs 6 GB" in str(raised.value)
    with pytest.raises(
        ConfigError, match=r"min_replica_size=5 needs as many nodes, but there are 4"
    ):
        peers(nodes, 5)
