"""A cluster's devices in classes of equal ones: planning costs per class, not per rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetero_fw.hardware import ClusterSpec, DeviceSpec, LinkSpec, NodeSpec, Precision
from hetero_fw.planning.cost import Ring

Counts = tuple[int, ...]
"""How many devices of each class a candidate plan uses."""


class Slot(NamedTuple):
    """A device of the cluster and the class it belongs to."""

    node_index: int
    local_rank: int
    class_index: int


@dataclass(frozen=True, kw_only=True)
class DeviceClass:
    """Equal devices on equal links.

    Attributes:
        nodes: (node index, devices) with the largest nodes first. Devices are taken in this
            order, so a part of a class spans as few nodes as possible.
    """

    device: DeviceSpec
    intra_link: LinkSpec
    inter_link: LinkSpec
    nodes: tuple[tuple[int, int], ...]

    @property
    def num_devices(self) -> int:
        return sum(size for _, size in self.nodes)

    def taken(self, count: int) -> Iterator[tuple[int, int]]:
        """(node index, devices used) of the first `count` devices."""
        for node_index, size in self.nodes:
            if count <= 0:
                return
            yield node_index, min(size, count)
            count -= size


@dataclass(frozen=True, kw_only=True)
class DevicePool:
    """A cluster's device classes, fastest first. The order of the nodes makes no difference."""

    cluster: ClusterSpec
    classes: tuple[DeviceClass, ...]

    @classmethod
    def of(cls, cluster: ClusterSpec) -> DevicePool:
        """Group the devices of `cluster`."""
        members: dict[tuple[object, ...], list[int]] = {}
        for index, node in enumerate(cluster.nodes):
            members.setdefault(_class_key(node), []).append(index)
        classes = [_device_class(cluster, indices) for indices in members.values()]
        classes.sort(key=_speed_order)
        return cls(cluster=cluster, classes=tuple(classes))

    @property
    def all_counts(self) -> Counts:
        return tuple(entry.num_devices for entry in self.classes)

    def devices(self, counts: Counts) -> list[DeviceSpec]:
        """One device of every class that is used."""
        return [entry.device for entry, n in zip(self.classes, counts, strict=True) if n]

    def ring(self, counts: Counts) -> Ring:
        """The ring through the used devices."""
        used = list(zip(self.classes, counts, strict=True))
        sizes = [(entry, size) for entry, n in used for _, size in entry.taken(n)]
        # One hop per device: inside its node to the next, from the last one to the next node.
        hops = [(entry.intra_link, size - 1) for entry, size in sizes]
        if len(sizes) > 1:
            hops += [(entry.inter_link, 1) for entry, _ in sizes]
        links = [(link, num_hops) for link, num_hops in hops if num_hops]
        return Ring(
            world_size=sum(counts),
            bytes_per_s=min((link.bytes_per_s for link, _ in links), default=math.inf),
            # Summed exactly, so that the order of the nodes makes no difference.
            latency_s=math.fsum(link.latency_s * num_hops for link, num_hops in links),
        )

    def slots(self, counts: Counts) -> list[Slot]:
        """The used devices in rank order: by node, then by local rank."""
        return sorted(
            Slot(node_index, local_rank, class_index)
            for class_index, count in enumerate(counts)
            for node_index, size in self.classes[class_index].taken(count)
            for local_rank in range(size)
        )


def _device_class(cluster: ClusterSpec, indices: Sequence[int]) -> DeviceClass:
    first = cluster.nodes[indices[0]]
    sizes = [(index, cluster.nodes[index].num_devices) for index in indices]
    return DeviceClass(
        device=first.device,
        intra_link=first.intra_link,
        inter_link=first.inter_link,
        nodes=tuple(sorted(sizes, key=lambda pair: (-pair[1], pair[0]))),
    )


def _class_key(node: NodeSpec) -> tuple[object, ...]:
    device = node.device
    rates = tuple(sorted(device.peak_flops.items()))
    # The whole specification counts: two groups may declare one device with different memory.
    facts = (device.name, device.kind, device.memory_bytes, device.mfu, rates)
    return (*facts, node.intra_link, node.inter_link)


def _speed_order(entry: DeviceClass) -> tuple[object, ...]:
    rate = max(entry.device.flops_per_s(precision) for precision in Precision)
    links = (-entry.inter_link.bytes_per_s, -entry.intra_link.bytes_per_s)
    return (-rate, entry.device.name, -entry.device.memory_bytes, *links)
