"""Look for checkpoints that are whole across tiers and replicas, by manifests and file sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_fw.checkpoint.directories import step_of
from hetero_fw.checkpoint.found import FoundCheckpoint, OnRejected
from hetero_fw.checkpoint.hashing import hexdigest
from hetero_fw.checkpoint.manifest import MANIFEST_NAME, Manifest, NewerFormatError
from hetero_fw.checkpoint.published import published_paths
from hetero_fw.checkpoint.ranks import Ranks
from hetero_fw.checkpoint.sources import (
    Rejection,
    Source,
    may_be_intact,
    patiently,
    unreadable,
)
from hetero_fw.checkpoint.storage import StoragePath, is_object_store, read_bytes
from hetero_fw.checkpoint.whereabouts import Whereabouts
from hetero_fw.errors import CheckpointError
from hetero_fw.policies import Departure

# Why a checkpoint must not be used although its bytes are sound; None if it may be.
Refuse = Callable[[Manifest], str | None]
# That others go before it although they may be of older steps; None if not.
Depart = Callable[[Manifest], Departure | None]


@dataclass(frozen=True, kw_only=True)
class TierRoot:
    """Where one tier keeps checkpoints, as one rank sees it.

    Attributes:
        tier: its name.
        path: directory of the checkpoints.
        node: whose directory it is; None: all ranks see the same.
    """

    tier: str
    path: StoragePath
    node: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """A manifest that a rank has found, or why it cannot be used.

    Attributes:
        name: of the directory in its root.
        order: among the versions of the step in that root; the newest is 0.
    """

    rank: int
    root: int
    name: str
    order: int
    directory: str
    distance: tuple[int, int]
    attempt: int = -1
    digest: str = ""
    problem: str = ""
    is_newer_format: bool = False

    @property
    def candidate(self) -> tuple[int, str]:
        return self.attempt, self.digest

    @property
    def place(self) -> tuple[int, str]:
        return self.root, self.name

    @property
    def preference(self) -> tuple[int, tuple[int, int], int, int]:
        """Sorts copies: those to be tried first come first."""
        return -self.attempt, self.distance, self.order, self.rank


@dataclass(frozen=True, kw_only=True)
class _Deferred:
    """A checkpoint that is tried when the search has come down to `until_step`."""

    until_step: int
    chosen: _Copy
    copies: Sequence[_Copy]
    manifest: Manifest


class Search:
    """One search by all ranks. The arguments are those of `find_candidates`."""

    def __init__(
        self,
        ranks: Ranks,
        roots: Sequence[TierRoot],
        prefix: str,
        *,
        refuse: Refuse,
        depart: Depart,
        on_rejected: OnRejected,
        patience_s: float,
    ) -> None:
        self._ranks = ranks
        # Numbered from the end, so that a number means the same shared tier on every rank.
        self._roots = {len(roots) - 1 - place: root for place, root in enumerate(roots)}
        self._prefix = prefix
        self._refuse = refuse
        self._depart = depart
        self._on_rejected = on_rejected
        self._patience_s = patience_s
        # Names of directories by root and step, newest first.
        self._names: dict[int, dict[int, list[str]]] = {}
        self._texts: dict[tuple[int, str], str] = {}
        self._deferred: list[_Deferred] = []
        self._told: set[str] = set()

    def candidates(self) -> Iterator[FoundCheckpoint]:
        """Every checkpoint that may serve, best first; the next is looked for when it is wanted."""
        for step in self._steps():
            yield from self._deferred_until(step)
            yield from self._of_step(step)
        yield from self._deferred_until(0)

    def _deferred_until(self, step: int) -> Iterator[FoundCheckpoint]:
        """Those whose turn comes before that of `step`, newest first."""
        due = [item for item in self._deferred if item.until_step >= step]
        self._deferred = [item for item in self._deferred if item.until_step < step]
        for item in sorted(due, key=lambda item: (-item.chosen.attempt, -item.manifest.step)):
            self._told.discard(item.chosen.directory)  # that it was passed over is no verdict
            found, problems = self._examine(item.chosen, item.copies, item.manifest)
            self._tell(problems)
            if found is not None:
                yield found

    def _steps(self) -> list[int]:
        """Every step that any rank sees, newest first."""
        found = self._ranks.gather_results(self._own_steps)
        return sorted(set().union(*found), reverse=True)

    def _own_steps(self) -> set[int]:
        for number, root in self._asked().items():
            by_step: dict[int, list[str]] = {}
            for name in self._list(root):
                step = step_of(name, self._prefix)
                if step is not None:
                    by_step.setdefault(step, []).append(name)
            self._names[number] = by_step
        return set().union(*self._names.values())

    def _list(self, root: TierRoot) -> list[str]:
        """Names of what may be a checkpoint; the later of two of a step comes first."""

        def look() -> list[str]:
            if is_object_store(root.path):
                return [path.name for path in published_paths(root.path, self._prefix)]
            # Not by a pattern, which finds nothing where the directory cannot be read.
            return sorted((entry.name for entry in root.path.iterdir()), reverse=True)

        try:
            return patiently(root.path, look, self._patience_of(root))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except Exception as error:  # stores raise what they like
            if root.node is not None:
                return []  # a lost disk is what the other copies are for
            raise CheckpointError(unreadable(root.path, error)) from error

    def _patience_of(self, root: TierRoot) -> float:
        return self._patience_s if root.node is None else 0.0

    def _asked(self) -> Mapping[int, TierRoot]:
        """Of what all see, rank 0 speaks for all."""
        return {
            number: root
            for number, root in self._roots.items()
            if root.node is not None or self._ranks.rank == 0
        }

    def _of_step(self, step: int) -> Iterator[FoundCheckpoint]:
        """Those of `step`; that of the latest attempt comes first."""
        self._texts = {}
        gathered = self._ranks.gather_results(lambda: self._own_copies(step))
        copies = [copy for theirs in gathered for copy in theirs]
        newer = [copy.problem for copy in copies if copy.is_newer_format]
        if newer:  # it is sound as far as anybody here can tell, and work would be lost
            raise NewerFormatError(newer[0])
        problems = [
            Rejection(step=step, path=copy.directory, reason=copy.problem)
            for copy in copies
            if copy.problem
        ]
        sound = [copy for copy in copies if not copy.problem]
        sound.sort(key=lambda copy: copy.preference)
        for candidate in dict.fromkeys(copy.candidate for copy in sound):
            chosen = next(copy for copy in sound if copy.candidate == candidate)
            found, more = self._judge(chosen, copies, problems)
            problems = [] if found is not None else [*problems, *more]
            if found is not None:
                yield found
        self._tell(problems)

    def _judge(
        self, chosen: _Copy, copies: Sequence[_Copy], problems: Sequence[Rejection]
    ) -> tuple[FoundCheckpoint | None, list[Rejection]]:
        """As `_examine`, unless the checkpoint is refused or its turn comes later."""
        text = self._ranks.broadcast(self._texts.get(chosen.place), source=chosen.rank)
        manifest = Manifest.from_json(text)
        verdict = self._verdict(chosen, manifest) if self._ranks.rank == 0 else None
        verdict = self._ranks.broadcast(verdict, source=0)
        if verdict is None:
            return self._examine(chosen, copies, manifest, problems)
        reason, until_step = verdict
        if until_step is not None:
            self._deferred.append(
                _Deferred(until_step=until_step, chosen=chosen, copies=copies, manifest=manifest)
            )
        return None, [Rejection(step=manifest.step, path=chosen.directory, reason=reason)]

    def _tell(self, problems: Sequence[Rejection]) -> None:
        for rejection in _by_directory(problems):
            self._tell_once(rejection)

    def _tell_once(self, rejection: Rejection) -> None:
        """A directory may be looked into for several versions of a step."""
        if rejection.path not in self._told:
            self._told.add(rejection.path)
            self._on_rejected(rejection)

    def _own_copies(self, step: int) -> list[_Copy]:
        found = []
        for number, root in self._asked().items():
            for order, name in enumerate(self._names[number].get(step, ())):
                facts: dict[str, Any] = {
                    "rank": self._ranks.rank,
                    "root": number,
                    "name": name,
                    "order": order,
                    "directory": str(root.path / name),
                    "distance": self._distance(number),
                }
                copy = self._look(root, step, facts)
                if copy is not None:
                    found.append(copy)
        return found

    def _look(self, root: TierRoot, step: int, facts: dict[str, Any]) -> _Copy | None:
        directory = root.path / facts["name"]
        file = directory / MANIFEST_NAME

        def read() -> bytes | None:
            is_there = is_object_store(directory) or directory.is_dir()
            return read_bytes(file) if is_there else None

        try:
            content = patiently(file, read, self._patience_of(root))
            if content is None:
                return None
            manifest = Manifest.from_json(content.decode("utf-8"))
            if manifest.step != step:
                raise CheckpointError(f"is the manifest of step {manifest.step}")
        except Exception as error:  # stores raise what they like; all is a verdict
            problem = str(error) if str(file) in str(error) else f"{file}: {error}"
            if root.node is None and may_be_intact(file, error):
                raise CheckpointError(problem) from error
            is_newer = isinstance(error, NewerFormatError)
            return _Copy(**facts, problem=problem, is_newer_format=is_newer)
        self._texts[facts["root"], facts["name"]] = content.decode("utf-8")
        digest = hexdigest(manifest.hash, content)
        return _Copy(**facts, attempt=manifest.attempt, digest=digest)

    def _distance(self, number: int) -> tuple[int, int]:
        return (int(self._roots[number].node is None), -number)

    def _examine(
        self,
        chosen: _Copy,
        copies: Sequence[_Copy],
        manifest: Manifest,
        problems: Sequence[Rejection] = (),
    ) -> tuple[FoundCheckpoint | None, list[Rejection]]:
        """The checkpoint if it may serve; if not, what is amiss in whichever directory.

        If it may, that is told once it is known whether it does, together with `problems`: each
        directory is told of once.
        """
        sources = self._sources(_usable(chosen, copies))
        where = Whereabouts(self._ranks, manifest, sources, manifest.tensors)
        where.raise_silence()
        if where.is_hopeless:
            return None, where.take_rejections()
        for problem in problems:
            where.note(problem.path, problem.reason)
        return FoundCheckpoint(whereabouts=where, on_rejected=self._tell_once), []

    def _sources(self, copies: Sequence[_Copy]) -> dict[int, Source]:
        """Those of this rank, by numbers that mean the same on all ranks."""
        sources = {}
        for source, place in enumerate(sorted({copy.place for copy in copies})):
            number, name = place
            root = self._roots.get(number)
            if root is None:
                continue
            speaker = 0 if root.node is None else self._ranks.rank
            if (speaker, place) in {(copy.rank, copy.place) for copy in copies}:
                sources[source] = Source(
                    tier=root.tier,
                    directory=root.path / name,
                    node=root.node,
                    distance=self._distance(number),
                    patience_s=self._patience_of(root),
                )
        return sources

    def _verdict(self, chosen: _Copy, manifest: Manifest) -> tuple[str, int | None] | None:
        """On rank 0: why not this one now, and the step at which its turn comes, if it does."""
        if not manifest.is_finite:
            return f"{chosen.directory}: it holds values that are not finite", None
        reason = self._refuse(manifest)
        if reason is not None:
            return f"{chosen.directory}: {reason}", None
        departure = self._depart(manifest)
        if departure is not None:
            return f"{chosen.directory}: {departure.reason}", departure.start_step
        return None


def _usable(chosen: _Copy, copies: Sequence[_Copy]) -> list[_Copy]:
    """Copies of the same save. One with a damaged manifest may be, and shards are verified anyway.

    Not where a sound one is beside it: then it is another version.
    """
    same = [copy for copy in copies if copy.candidate == chosen.candidate and not copy.problem]
    known = {(copy.rank, copy.root) for copy in same}
    return same + [copy for copy in copies if copy.problem and (copy.rank, copy.root) not in known]


def _by_directory(problems: Sequence[Rejection]) -> list[Rejection]:
    """One rejection for each directory, with all that is wrong there."""
    reasons: dict[tuple[int | None, str], list[str]] = {}
    for problem in problems:
        reasons.setdefault((problem.step, problem.path), []).append(problem.reason)
    return [
        Rejection(step=step, path=path, reason="; ".join(dict.fromkeys(found)))
        for (step, path), found in reasons.items()
    ]
