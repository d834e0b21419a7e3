"""Which rank can read which file of a checkpoint where, and what was amiss on the way."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hetero_fw.checkpoint.assignment import Holder, assign_spans
from hetero_fw.checkpoint.manifest import Manifest
from hetero_fw.checkpoint.ranks import Ranks
from hetero_fw.checkpoint.reading import ReadResult
from hetero_fw.checkpoint.sources import Rejection, Source, SourceFacts, look_at
from hetero_fw.checkpoint.spans import Span
from hetero_fw.errors import CheckpointError


class Whereabouts:
    """The same on all ranks, but for their sources. All ranks create it together.

    Nothing is asked of storage twice: it is known from the start which files are there with their
    size, and what turns out wrong when it is read is struck out.

    Args:
        sources: where this rank may look, by numbers that mean the same tier on all ranks.
        names: of the tensors whose files are wanted.
    """

    def __init__(
        self,
        ranks: Ranks,
        manifest: Manifest,
        sources: Mapping[int, Source],
        names: Collection[str],
    ) -> None:
        self.ranks = ranks
        self.manifest = manifest
        self.sources = sources
        self._files = {chunk.file for fqn in names for chunk in manifest.tensors[fqn].chunks}
        self._problems: dict[str, list[str]] = {}
        self._num_told: dict[str, int] = {}
        self._explained: set[str] = set()
        self._silence: dict[str, str] = {}
        self._facts = self._gather_facts()
        self._holders = self._find_holders()

    def _gather_facts(self) -> dict[tuple[int, int], SourceFacts]:
        """What is where, by rank and number of the source."""
        sizes = {file.name: file.size for file in self.manifest.files if file.name in self._files}
        own = {
            number: look_at(source, sizes)
            for number, source in self.sources.items()
            if self.ranks.rank == 0 or not source.is_shared
        }
        # Of what all see, rank 0 speaks for all: fewer questions to storage.
        gathered = self.ranks.gather((own, [n for n in self.sources if n not in own]))
        facts = {
            (rank, number): found
            for rank, (theirs, _) in enumerate(gathered)
            for number, found in theirs.items()
        }
        for rank, (_, numbers) in enumerate(gathered):
            for number in numbers:
                facts[rank, number] = facts[0, number]
        return facts

    def _find_holders(self) -> dict[str, set[Holder]]:
        holders: dict[str, set[Holder]] = {}
        for (rank, number), facts in self._facts.items():
            for name, problem in facts.problems.items():
                self.note(facts.directory, problem, name)
            for name in facts.files:
                holder = Holder(distance=facts.distance, rank=rank, source=number)
                holders.setdefault(name, set()).add(holder)
            if facts.silence:
                self.note(facts.directory, facts.silence)
                if facts.node is None:
                    self._silence |= {file.name: facts.silence for file in self.manifest.files}
        return holders

    @property
    def is_hopeless(self) -> bool:
        """Whether some file has no place left to be read from."""
        return bool(self._lost_files())

    def _lost_files(self) -> set[str]:
        return {name for name in self._files if not self._holders.get(name)}

    def assign(self, spans: Sequence[Span]) -> tuple[Holder | None, ...]:
        """Who reads each of `spans`, and where."""
        return assign_spans(
            spans,
            self._holders,
            files=[file.name for file in self.manifest.files],
            world_size=self.ranks.size,
        )

    def facts_of(self, holder: Holder) -> SourceFacts:
        """The directory that `holder` reads from."""
        return self._facts[holder.rank, holder.source]

    def drop(self, holder: Holder, file: str, failure: ReadResult) -> None:
        """Read no more of `file` from there; nobody does where everybody sees the same.

        A storage that has been silent for so long is not waited for by one rank after the other.
        """
        facts = self.facts_of(holder)
        is_common = failure.is_damaged or failure.is_silent
        if failure.is_silent and facts.node is None:
            self._silence[file] = failure.problem
        self.note(facts.directory, failure.problem, file)
        for other in list(self._holders[file]):
            theirs = self.facts_of(other)
            is_same = (theirs.node, theirs.directory) == (facts.node, facts.directory)
            if other == holder or (is_common and is_same):
                self._holders[file].discard(other)

    def note(self, directory: str, problem: str, *files: str) -> None:
        """Something is amiss there; `files` are lost to it, if any are."""
        self._explained.update(files)
        known = self._problems.setdefault(directory, [])
        if problem not in known:
            known.append(problem)

    def take_rejections(self) -> list[Rejection]:
        """Every directory in which something was amiss that was not taken before."""
        lost = self._lost_files()
        if lost - self._explained:
            names = ", ".join(sorted(lost - self._explained))
            self.note(self.nearest(), f"{self.nearest()}: no copy is left of {names}", *lost)
        fresh = {
            directory: problems[self._num_told.get(directory, 0) :]
            for directory, problems in self._problems.items()
        }
        self._num_told = {directory: len(known) for directory, known in self._problems.items()}
        return [
            Rejection(step=self.manifest.step, path=directory, reason="; ".join(problems))
            for directory, problems in fresh.items()
            if problems
        ]

    def raise_silence(self) -> None:
        """Go back to no older checkpoint while all that is missing may be where nobody answers.

        Raises:
            CheckpointError: that is so. Names the storage.
        """
        lost = self._lost_files()
        if lost and lost <= self._silence.keys():
            reasons = dict.fromkeys(self._silence[name] for name in sorted(lost))
            raise CheckpointError("; ".join(reasons))

    def nearest(self) -> str:
        """The directory of the nearest source."""
        return min((facts.distance, facts.directory) for facts in self._facts.values())[1]
