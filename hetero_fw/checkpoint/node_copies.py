"""Checkpoints whose files lie in directories of several nodes, as far as this host sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hetero_fw.checkpoint.catalog import CheckpointInfo, info_of, verify_file
from hetero_fw.checkpoint.directories import step_of
from hetero_fw.checkpoint.hashing import HashAlgorithm
from hetero_fw.checkpoint.manifest import FileEntry, Manifest, NewerFormatError, read_manifest
from hetero_fw.checkpoint.published import published_paths
from hetero_fw.checkpoint.quarantine import Quarantine
from hetero_fw.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class NodeCopies:
    """One checkpoint in the directories of its nodes.

    Attributes:
        manifest: None if no node has one that can be read.
        directories: of the checkpoint, by node; also those whose manifest is damaged, because
            their files may be sound.
        problems: what is wrong with manifests.
        is_newer: no manifest can be read here, and one of them is of a newer release.
    """

    step: int
    manifest: Manifest | None
    directories: Mapping[str, Path]
    problems: tuple[str, ...] = ()
    is_newer: bool = False

    def info(self, quarantine: Quarantine) -> CheckpointInfo | None:
        """The facts of its manifest; None without one."""
        if self.manifest is None:
            return None
        return info_of(next(iter(self.directories.values())), self.manifest, quarantine)


@dataclass(frozen=True, kw_only=True)
class NodeFindings:
    """What became of the files of a checkpoint in node directories.

    Attributes:
        missing: files that no node has as they were written; without them it cannot be restored.
        num_copies: on how many nodes each file is at least.
        problems: copies and manifests that are damaged, also where another one is sound.
    """

    missing: tuple[str, ...]
    num_copies: int
    problems: tuple[str, ...]


def find_node_copies(root: Path, prefix: str) -> list[NodeCopies]:
    """Checkpoints in the node directories below `root`, newest first.

    A step that a later attempt has saved again is another checkpoint, and comes before.
    """
    by_step: dict[int, dict[str, Path]] = {}
    for node in sorted(path for path in _entries(root) if path.is_dir()):
        for path in published_paths(node, prefix):
            step = step_of(path.name, prefix)
            assert step is not None
            by_step.setdefault(step, {})[node.name] = node / path.name
    return [
        copies for step in sorted(by_step, reverse=True) for copies in _of_step(step, by_step[step])
    ]


def examine_node_copies(copies: NodeCopies, *, reads_bytes: bool) -> NodeFindings:
    """Look for every file in the directories of all nodes together.

    Args:
        copies: the checkpoint.
        reads_bytes: compare every byte of every copy, otherwise sizes alone.
    """
    manifest = copies.manifest
    algorithm = manifest.hash if manifest is not None and reads_bytes else None
    num_sound, problems = {}, list(copies.problems)
    for file in manifest.files if manifest is not None else ():
        there = [path for path in copies.directories.values() if (path / file.name).exists()]
        found = [_problem(path, file, algorithm) for path in there]
        problems += filter(None, found)
        num_sound[file.name] = found.count(None)
    return NodeFindings(
        missing=tuple(name for name, count in num_sound.items() if count == 0),
        num_copies=min(num_sound.values(), default=0),
        problems=tuple(problems),
    )


def _of_step(step: int, directories: Mapping[str, Path]) -> list[NodeCopies]:
    """Nodes with the same manifest have the same checkpoint."""
    manifests: dict[tuple[int, tuple[FileEntry, ...]], Manifest] = {}
    nodes: dict[tuple[int, tuple[FileEntry, ...]], list[str]] = {}
    problems, is_newer = {}, False
    for node, path in directories.items():
        try:
            manifest = read_manifest(path)
            if manifest.step != step:
                raise CheckpointError(f"{path}: its manifest is of step {manifest.step}")
        except CheckpointError as error:
            problems[node] = str(error)
            is_newer = is_newer or isinstance(error, NewerFormatError)
            continue
        identity = (manifest.attempt, manifest.files)
        manifests.setdefault(identity, manifest)
        nodes.setdefault(identity, []).append(node)
    told = tuple(problems.values())
    if not manifests:
        return [
            NodeCopies(
                step=step,
                manifest=None,
                directories=directories,
                problems=told,
                is_newer=is_newer,
            )
        ]
    return [
        NodeCopies(
            step=step,
            manifest=manifests[identity],
            directories={node: directories[node] for node in (*nodes[identity], *problems)},
            problems=told,
        )
        for identity in sorted(manifests, key=lambda identity: -identity[0])
    ]


def _problem(path: Path, file: FileEntry, algorithm: HashAlgorithm | None) -> str | None:
    """What is wrong with a copy, by its size alone if there is no `algorithm`."""
    try:
        if algorithm is not None:
            verify_file(path, file, algorithm)
        elif (size := (path / file.name).stat().st_size) != file.size:
            return f"{path / file.name}: has {size} bytes, {file.size} were written"
    except OSError as error:
        return f"{path / file.name}: cannot be read ({error.strerror or error})"
    except CheckpointError as error:
        return str(error)
    return None


def _entries(root: Path) -> list[Path]:
    return list(root.iterdir()) if root.is_dir() else []
