"""Find the newest checkpoint that is whole across tiers and replicas, and read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from hetero_fw.checkpoint.directories import checkpoint_path, step_of
from hetero_fw.checkpoint.held import HeldCheckpoint
from hetero_fw.checkpoint.holding import hold_checkpoint
from hetero_fw.checkpoint.manifest import MANIFEST_NAME, Manifest
from hetero_fw.checkpoint.ranks import Ranks
from hetero_fw.checkpoint.sources import Rejection, Source, unreadable
from hetero_fw.errors import CheckpointError

OnRejected = Callable[[Rejection], None]
# Why a checkpoint must not be used although its bytes are sound; None if it may be.
Refuse = Callable[[Manifest], str | None]


@dataclass(frozen=True, kw_only=True)
class TierRoot:
    """Where one tier keeps checkpoints, as one rank sees it.

    Attributes:
        tier: its name.
        path: directory of the checkpoints; a path, or an object that is used like one.
        node: whose directory it is; None: all ranks see the same.
    """

    tier: str
    path: Any
    node: str | None = None


def find_newest(
    ranks: Ranks,
    roots: Sequence[TierRoot],
    prefix: str,
    *,
    refuse: Refuse,
    on_rejected: OnRejected,
) -> HeldCheckpoint | None:
    """Read the newest checkpoint of which every byte is somewhere as it was written.

    All ranks call this. A later attempt's checkpoint of a step goes before an earlier one's.

    Args:
        roots: of this rank, nearest first. Those that all ranks see come last, on every rank in
            the same order.
        prefix: first part of the names of checkpoints.
        refuse: asked on rank 0; must not raise.
        on_rejected: called on all ranks for every directory that did not serve, also where
            another one took its place.

    Returns:
        None if there is no such checkpoint.

    Raises:
        CheckpointError: a storage that all ranks see does not say what it holds.
    """
    search = _Search(ranks, roots, prefix, refuse, on_rejected)
    for step in search.steps():
        held = search.hold_step(step)
        if held is not None:
            return held
    return None


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """A manifest that a rank has found, or why it cannot be used."""

    rank: int
    root: int
    directory: str
    distance: tuple[int, int]
    attempt: int = -1
    digest: str = ""
    problem: str = ""

    @property
    def candidate(self) -> tuple[int, str]:
        return self.attempt, self.digest


class _Search:
    def __init__(
        self,
        ranks: Ranks,
        roots: Sequence[TierRoot],
        prefix: str,
        refuse: Refuse,
        on_rejected: OnRejected,
    ) -> None:
        self._ranks = ranks
        # Numbered from the end, so that a number means the same shared tier on every rank.
        self._roots = {len(roots) - 1 - place: root for place, root in enumerate(roots)}
        self._prefix = prefix
        self._refuse = refuse
        self._on_rejected = on_rejected
        self._texts: dict[int, str] = {}

    def steps(self) -> list[int]:
        """Every step that any rank sees, newest first."""
        found = self._ranks.gather_results(self._own_steps)
        return sorted(set().union(*found), reverse=True)

    def _own_steps(self) -> set[int]:
        found: set[int] = set()
        for root in self._asked().values():
            try:
                names = [entry.name for entry in root.path.iterdir()]
            except (FileNotFoundError, NotADirectoryError):
                continue
            except Exception as error:  # stores raise what they like
                if root.node is not None:
                    continue  # a lost disk is what the other copies are for
                raise CheckpointError(unreadable(root.path, error)) from error
            found |= {step for name in names if (step := step_of(name, self._prefix)) is not None}
        return found

    def _asked(self) -> Mapping[int, TierRoot]:
        """Of what all see, rank 0 speaks for all."""
        return {
            number: root
            for number, root in self._roots.items()
            if root.node is not None or self._ranks.rank == 0
        }

    def hold_step(self, step: int) -> HeldCheckpoint | None:
        """The checkpoint of `step` by the latest attempt that left one to be read."""
        self._texts = {}
        gathered = self._ranks.gather(self._own_copies(step))
        copies = [copy for theirs in gathered for copy in theirs]
        problems = [
            Rejection(step=step, path=copy.directory, reason=copy.problem)
            for copy in copies
            if copy.problem
        ]
        sound = [copy for copy in copies if not copy.problem]
        sound.sort(key=lambda copy: (-copy.attempt, copy.distance, copy.rank))
        held = None
        for candidate in dict.fromkeys(copy.candidate for copy in sound):
            chosen = next(copy for copy in sound if copy.candidate == candidate)
            held, more = self._hold(step, chosen, copies)
            problems += more
            if held is not None:
                break
        for rejection in _by_directory(problems):
            self._on_rejected(rejection)
        return held

    def _own_copies(self, step: int) -> list[_Copy]:
        found = []
        for number, root in self._asked().items():
            copy = self._look(number, root, step)
            if copy is not None:
                found.append(copy)
        return found

    def _look(self, number: int, root: TierRoot, step: int) -> _Copy | None:
        directory = self._directory(root, step)
        file = directory / MANIFEST_NAME
        facts: dict[str, Any] = {
            "rank": self._ranks.rank,
            "root": number,
            "directory": str(directory),
            "distance": self._distance(number),
        }
        try:
            if not directory.is_dir():
                return None
            text = file.read_text(encoding="utf-8")
            manifest = Manifest.from_json(text)
            if manifest.step != step:
                raise CheckpointError(f"is the manifest of step {manifest.step}")
        except Exception as error:  # noqa: BLE001  # stores raise what they like; all is a verdict
            return _Copy(**facts, problem=f"{file}: {error}")
        self._texts[number] = text
        digest = xxhash.xxh3_128_hexdigest(text.encode())
        return _Copy(**facts, attempt=manifest.attempt, digest=digest)

    def _directory(self, root: TierRoot, step: int) -> Any:
        return root.path / checkpoint_path(Path(), self._prefix, step).name

    def _distance(self, number: int) -> tuple[int, int]:
        return (int(self._roots[number].node is None), -number)

    def _hold(
        self, step: int, chosen: _Copy, copies: Sequence[_Copy]
    ) -> tuple[HeldCheckpoint | None, list[Rejection]]:
        text = self._ranks.broadcast(self._texts.get(chosen.root), source=chosen.rank)
        manifest = Manifest.from_json(text)
        refusal = self._ranks.broadcast(self._refusal(chosen, manifest), source=0)
        if refusal is not None:
            return None, [Rejection(step=step, path=chosen.directory, reason=refusal)]
        # A directory whose manifest is damaged may hold sound shards; they are verified anyway.
        usable = {
            (copy.rank, copy.root)
            for copy in copies
            if copy.problem or copy.candidate == chosen.candidate
        }
        sources = {
            number: Source(
                tier=root.tier,
                directory=self._directory(root, step),
                node=root.node,
                distance=self._distance(number),
            )
            for number, root in self._roots.items()
            if (0 if root.node is None else self._ranks.rank, number) in usable
        }
        return hold_checkpoint(self._ranks, manifest, sources, sorted(manifest.tensors))

    def _refusal(self, chosen: _Copy, manifest: Manifest) -> str | None:
        if self._ranks.rank != 0:
            return None
        if not manifest.is_finite:
            return f"{chosen.directory}: it holds values that are not finite"
        reason = self._refuse(manifest)
        return f"{chosen.directory}: {reason}" if reason is not None else None


def _by_directory(problems: Sequence[Rejection]) -> list[Rejection]:
    """One rejection for each directory, with all that is wrong there."""
    reasons: dict[tuple[int | None, str], list[str]] = {}
    for problem in problems:
        reasons.setdefault((problem.step, problem.path), []).append(problem.reason)
    return [
        Rejection(step=step, path=path, reason="; ".join(dict.fromkeys(found)))
        for (step, path), found in reasons.items()
    ]
