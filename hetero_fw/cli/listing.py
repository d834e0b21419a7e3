"""The checkpoints of a run as data and as text, those in node directories too."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from hetero_fw.checkpoint import (
    CheckpointInfo,
    NewerFormatError,
    NodeCopies,
    Quarantine,
    StorageError,
    StoragePath,
    examine_node_copies,
    find_node_copies,
    read_info,
    read_quarantine,
    step_of,
    verify_checkpoint,
)
from hetero_fw.cli.checkpoints import CheckpointStore
from hetero_fw.errors import CheckpointError
from hetero_fw.monitoring import format_bytes, format_duration, format_number
from hetero_fw.policies import Tier, find_departure

_HEADER = ("step", "age", "size", "tier", "verified", "metric", "why it was saved")
_NUM_NUMBERS = 3


def describe_checkpoints(
    store: CheckpointStore, *, reads_bytes: bool, step: int | None = None
) -> list[dict[str, Any]]:
    """Plain data about checkpoints, newest first; those of `step` alone if it is given.

    Returns:
        step, tier. path: for node directories that of the first one. age_s, size_bytes,
            world_size, attempt, reason, metric: None if the manifest cannot be read. is_verified:
            None if the bytes were not read. problem: what is wrong, None if nothing is known to
            be. is_newer_format: a newer release wrote it, and only that can tell. quarantine: why
            no run continues from it. departure: why one that is sound is tried only after older
            ones. nodes: whose directories were looked at; missing: files that none of them has
            intact; num_copies: nodes that have each file at least; all None in the storage.

    Raises:
        CheckpointError: there is none of `step`, or the storage does not answer.
    """
    rows = _stored_rows(store, step, reads_bytes=reads_bytes)
    if store.local is not None:
        quarantine = read_quarantine(store.root)
        rows += [
            _describe_copies(copies, quarantine, reads_bytes=reads_bytes)
            for copies in find_node_copies(store.local, store.prefix)
            if step in (None, copies.step)
        ]
    if step is not None and not rows:
        store.path(step)  # raises, and names those that there are
    nearest_first = {tier.value: place for place, tier in enumerate(Tier)}
    rows = [row | {"departure": _departure(row, store)} for row in rows]
    return sorted(rows, key=lambda row: (-row["step"], nearest_first[row["tier"]]))


def _departure(row: Mapping[str, Any], store: CheckpointStore) -> str | None:
    if row["attempt"] is None:
        return None
    departure = find_departure(row["step"], row["attempt"], store.starts)
    return None if departure is None else departure.reason


def format_checkpoints(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each checkpoint in each tier."""
    if not rows:
        return "no checkpoints"
    table = [_HEADER, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column < _NUM_NUMBERS else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    ]
    return "\n".join(line.rstrip() for line in lines)


def _stored_rows(
    store: CheckpointStore, step: int | None, *, reads_bytes: bool
) -> list[dict[str, Any]]:
    rows = []
    for path in store.paths():
        number = step_of(path.name, store.prefix)
        if step in (None, number):
            row = {"step": number, "tier": Tier.STORAGE.value, "path": str(path)}
            rows.append(row | _describe_stored(path, store.prefix, reads_bytes=reads_bytes))
    return rows


def _describe_stored(path: StoragePath, prefix: str, *, reads_bytes: bool) -> dict[str, Any]:
    info: CheckpointInfo | None = None
    problem, is_verified, is_newer = None, None, False
    try:
        info = read_info(path, prefix)
        if reads_bytes:
            verify_checkpoint(info)
            is_verified = True
    except CheckpointError as error:
        if isinstance(error, StorageError) and error.is_transient:
            raise  # that it cannot be read now says nothing about it
        is_newer = isinstance(error, NewerFormatError)
        problem, is_verified = str(error), None if is_newer else False
    places = {"nodes": None, "missing": None, "num_copies": None}
    findings = {"is_verified": is_verified, "problem": problem, "is_newer_format": is_newer}
    return {**_facts(info), **findings, **places}


def _describe_copies(
    copies: NodeCopies, quarantine: Quarantine, *, reads_bytes: bool
) -> dict[str, Any]:
    findings = examine_node_copies(copies, reads_bytes=reads_bytes)
    nodes = list(copies.directories)
    problems = list(findings.problems)
    if findings.missing:
        names = ", ".join(findings.missing)
        problems.insert(0, f"{names} not in the directories seen from here ({', '.join(nodes)})")
    is_whole = copies.manifest is not None and not findings.missing
    return {
        "step": copies.step,
        "tier": Tier.LOCAL.value,
        "path": str(next(iter(copies.directories.values()))),
        **_facts(copies.info(quarantine)),
        "is_verified": (True if reads_bytes else None) if is_whole or copies.is_newer else False,
        "is_newer_format": copies.is_newer,
        "problem": "; ".join(problems) or None,
        "nodes": nodes,
        "missing": list(findings.missing),
        "num_copies": findings.num_copies,
    }


def _facts(info: CheckpointInfo | None) -> dict[str, Any]:
    metric = info.metric if info else None
    return {
        "age_s": time.time() - info.created_time_s if info else None,
        "size_bytes": info.size_bytes if info else None,
        "world_size": info.world_size if info else None,
        "attempt": info.attempt if info else None,
        "metric": {"name": metric.name, "value": metric.value} if metric else None,
        "reason": info.reason if info else None,
        "quarantine": info.quarantine if info else None,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    metric = row["metric"]
    verified = {None: "not read", True: "yes", False: "DAMAGED"}[row["is_verified"]]
    if row["is_newer_format"]:
        verified = "NEWER"
    copies = "" if row["num_copies"] is None else f" x{row['num_copies']}"
    cells = (
        str(row["step"]),
        "" if row["age_s"] is None else format_duration(max(1.0, row["age_s"])),
        "" if row["size_bytes"] is None else format_bytes(row["size_bytes"]),
        f"{row['tier']}{copies}",
        "INCOMPLETE" if row["missing"] else verified,
        f"{metric['name']} {format_number(metric['value'])}" if metric else "-",
        row["problem"] or row["quarantine"] or row["departure"] or row["reason"],
    )
    return tuple(map(_printable, cells))


def _printable(text: str) -> str:
    """What a manifest holds may not be meant for a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
