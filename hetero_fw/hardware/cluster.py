"""A cluster from its declaration in the configuration, with every problem reported at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetero_fw.errors import ConfigError, did_you_mean
from hetero_fw.hardware.catalog import DEVICES, LINKS, unknown_name
from hetero_fw.hardware.spec import GIB, ClusterSpec, DeviceSpec, NodeSpec

MAX_DEVICES = 65_536
_GROUP_KEYS = ("device", "num_nodes", "devices_per_node", "memory_gib", "mfu")


def build_cluster(
    *,
    name: str,
    groups: Mapping[str, Mapping[str, Any]],
    intra_link: str,
    inter_link: str,
    planning_only: bool = False,
    notes: Sequence[str] = (),
) -> ClusterSpec:
    """Check a declared cluster and build it.

    Args:
        name: name of the hardware profile.
        groups: per group `device` (catalog name), `num_nodes` (0 leaves the group out),
            `devices_per_node`, and optionally `memory_gib` and `mfu`, which override the catalog.
        intra_link: catalog name of the link between the devices of a node.
        inter_link: catalog name of the link between nodes.
        planning_only: the cluster can be planned for, not run on.
        notes: what the user should know about the profile.

    Returns:
        The cluster; nodes are named `<group>-<i>` and keep the order of the groups.

    Raises:
        ConfigError: lists every problem, each with its config key, rule and valid choices.
    """
    problems = [
        *_link_problems("hardware.intra_link", intra_link),
        *_link_problems("hardware.inter_link", inter_link),
    ]
    for group, fields in groups.items():
        problems += _group_problems(f"hardware.groups.{group}", fields)
    if not problems:
        problems += _size_problems(groups)
    ConfigError.collect(problems)
    nodes = tuple(
        NodeSpec(
            name=f"{group}-{index}",
            group=group,
            device=device,
            num_devices=fields["devices_per_node"],
            intra_link=LINKS[intra_link],
            inter_link=LINKS[inter_link],
        )
        for group, fields in groups.items()
        for device in (_device_of(fields),)
        for index in range(fields["num_nodes"])
    )
    return ClusterSpec(name=name, nodes=nodes, planning_only=planning_only, notes=tuple(notes))


def _device_of(fields: Mapping[str, Any]) -> DeviceSpec:
    device = DEVICES[fields["device"]]
    if fields.get("memory_gib") is not None:
        device = replace(device, memory_bytes=int(fields["memory_gib"] * GIB))
    if fields.get("mfu") is not None:
        device = replace(device, mfu=float(fields["mfu"]))
    return device


def _link_problems(key: str, name: object) -> Iterator[str]:
    if not isinstance(name, str) or name not in LINKS:
        yield unknown_name(key, name, LINKS, "link")


def _group_problems(key: str, fields: object) -> Iterator[str]:
    if not isinstance(fields, Mapping):
        yield f"{key}={fields!r} must be a mapping with the keys {', '.join(_GROUP_KEYS)}."
        return
    for field in fields:
        if field not in _GROUP_KEYS:
            hint = did_you_mean(str(field), _GROUP_KEYS)
            yield f"{key}.{field} is not a known key.{hint} Keys: {', '.join(_GROUP_KEYS)}."
    device = fields.get("device")
    if not isinstance(device, str) or device not in DEVICES:
        yield unknown_name(f"{key}.device", device, DEVICES, "device")
    yield from _count_problems(f"{key}.num_nodes", fields.get("num_nodes"), least=0)
    yield from _count_problems(f"{key}.devices_per_node", fields.get("devices_per_node"), least=1)
    yield from _number_problems(f"{key}.memory_gib", fields.get("memory_gib"), most=math.inf)
    yield from _number_problems(f"{key}.mfu", fields.get("mfu"), most=1.0)


def _count_problems(key: str, value: object, *, least: int) -> Iterator[str]:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        yield f"{key}={value} must be a whole number of at least {least}."


def _number_problems(key: str, value: object, *, most: float) -> Iterator[str]:
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Written so that NaN fails too; infinity is no memory size.
    if not is_number or not 0 < float(str(value)) <= most or value == math.inf:
        limit = "" if most == math.inf else f" and at most {most:g}"
        yield f"{key}={value} must be a number greater than 0{limit}, or null for the catalog's."


def _size_problems(groups: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    total = sum(fields["num_nodes"] * fields["devices_per_node"] for fields in groups.values())
    if total == 0:
        zero = ", ".join(f"hardware.groups.{group}.num_nodes" for group in groups)
        remedy = f"Set one of {zero} to at least 1." if zero else "Declare at least one group."
        yield f"hardware.groups has no device. {remedy}"
    elif total > MAX_DEVICES:
        yield f"hardware.groups declares {total} devices; at most {MAX_DEVICES} can be planned for."
