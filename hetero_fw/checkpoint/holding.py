"""Read a checkpoint with all ranks: assign, read, compare notes, and try elsewhere what failed."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from hetero_fw.checkpoint.assignment import Holder, assign_spans
from hetero_fw.checkpoint.held import HeldCheckpoint
from hetero_fw.checkpoint.manifest import Manifest
from hetero_fw.checkpoint.ranks import Ranks
from hetero_fw.checkpoint.reading import ReadRequest, ReadResult, read_spans
from hetero_fw.checkpoint.sources import Rejection, Source, SourceFacts, look_at
from hetero_fw.checkpoint.spans import find_spans
from hetero_fw.errors import CheckpointError


def hold_checkpoint(
    ranks: Ranks, manifest: Manifest, sources: Mapping[int, Source], names: Collection[str]
) -> tuple[HeldCheckpoint | None, list[Rejection]]:
    """Read and verify the tensors `names` of a checkpoint, each byte by one rank.

    All ranks call it. What one place does not hold as it was written is read from another.

    Args:
        sources: where this rank may look, by numbers that mean the same tier on all ranks.

    Returns:
        None if some bytes are nowhere as they were written; and every directory that failed.

    Raises:
        CheckpointError: a storage that all ranks see does not say whether it has what is missing;
            raised on all ranks. Names the storage.
    """
    reading = _Reading(ranks, manifest, sources, names)
    while reading.pending and not reading.is_hopeless:
        reading.read_round()
    rejections = reading.rejections()
    if reading.is_hopeless:
        reading.raise_silence()
        return None, rejections
    return reading.result(), rejections


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What one rank has read in a round, and how long that took."""

    read_s: float
    num_bytes: int
    done: tuple[int, ...]
    failures: tuple[ReadResult, ...]


class _Reading:
    """The same on all ranks, but for the contents."""

    def __init__(
        self,
        ranks: Ranks,
        manifest: Manifest,
        sources: Mapping[int, Source],
        names: Collection[str],
    ) -> None:
        self._ranks = ranks
        self._manifest = manifest
        self._sources = sources
        self._spans = find_spans(manifest, names, num_readers=ranks.size)
        self._owners: dict[int, Holder] = {}
        self._contents: dict[int, torch.Tensor] = {}
        self._num_bytes = 0
        self._read_s = 0.0
        self._problems: dict[str, list[str]] = {}
        self._explained: set[str] = set()
        self._silence: dict[str, str] = {}
        self.pending = list(range(len(self._spans)))
        self._facts = self._gather_facts()
        self._holders = self._find_holders()
        self._assigned = self._assign()

    def _gather_facts(self) -> dict[tuple[int, int], SourceFacts]:
        """What is where, by rank and number of the source."""
        needed = {span.file for span in self._spans}
        sizes = {file.name: file.size for file in self._manifest.files if file.name in needed}
        own = {
            number: look_at(source, sizes)
            for number, source in self._sources.items()
            if self._ranks.rank == 0 or not source.is_shared
        }
        # Of what all see, rank 0 speaks for all: fewer questions to storage.
        gathered = self._ranks.gather((own, [n for n in self._sources if n not in own]))
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
                self._note(facts.directory, problem, name)
            for name in facts.files:
                holder = Holder(distance=facts.distance, rank=rank, source=number)
                holders.setdefault(name, set()).add(holder)
            if facts.silence:
                self._note(facts.directory, facts.silence)
                if facts.node is None:
                    self._silence |= {file.name: facts.silence for file in self._manifest.files}
        return holders

    def _assign(self) -> tuple[Holder | None, ...]:
        return assign_spans(
            [self._spans[number] for number in self.pending],
            self._holders,
            files=[file.name for file in self._manifest.files],
            world_size=self._ranks.size,
        )

    @property
    def is_hopeless(self) -> bool:
        """Whether some bytes have no place left to be read from."""
        return None in self._assigned

    def read_round(self) -> None:
        """Read what is pending, tell each other, and assign anew what failed."""
        assigned = dict(zip(self.pending, self._assigned, strict=True))
        mine = [
            ReadRequest(
                number=number,
                span=self._spans[number],
                directory=self._sources[holder.source].directory,
                patience_s=self._sources[holder.source].patience_s,
            )
            for number, holder in assigned.items()
            if holder is not None and holder.rank == self._ranks.rank
        ]
        began_s = time.perf_counter()
        results = read_spans(mine)
        self._contents |= {r.number: r.content for r in results if r.content is not None}
        report = _Report(
            read_s=time.perf_counter() - began_s,
            num_bytes=sum(self._spans[request.number].num_chunk_bytes for request in mine),
            done=tuple(result.number for result in results if result.content is not None),
            failures=tuple(result for result in results if result.content is None),
        )
        reports = self._ranks.gather(report)
        for theirs in reports:
            self._take(theirs, assigned)
        self._read_s += max(theirs.read_s for theirs in reports)
        self.pending = [number for number in self.pending if number not in self._owners]
        self._assigned = self._assign()

    def _take(self, report: _Report, assigned: Mapping[int, Holder | None]) -> None:
        self._num_bytes += report.num_bytes
        for number in report.done:
            holder = assigned[number]
            assert holder is not None
            self._owners[number] = holder
        for failure in report.failures:
            holder = assigned[failure.number]
            assert holder is not None
            self._drop(holder, self._spans[failure.number].file, failure)

    def _drop(self, holder: Holder, file: str, failure: ReadResult) -> None:
        """Read no more of `file` from there; nobody does where everybody sees the same.

        A storage that has been silent for so long is not waited for by one rank after the other.
        """
        facts = self._facts[holder.rank, holder.source]
        is_common = failure.is_damaged or failure.is_silent
        if failure.is_silent and facts.node is None:
            self._silence[file] = failure.problem
        self._note(facts.directory, failure.problem, file)
        for other in list(self._holders[file]):
            theirs = self._facts[other.rank, other.source]
            is_same = (theirs.node, theirs.directory) == (facts.node, facts.directory)
            if other == holder or (is_common and is_same):
                self._holders[file].discard(other)

    def _note(self, directory: str, problem: str, *files: str) -> None:
        self._explained.update(files)
        known = self._problems.setdefault(directory, [])
        if problem not in known:
            known.append(problem)

    def rejections(self) -> list[Rejection]:
        """Every directory in which something was amiss."""
        lost = self._lost_files()
        if lost - self._explained:
            names = ", ".join(sorted(lost - self._explained))
            self._note(self._nearest(), f"{self._nearest()}: no copy is left of {names}")
        return [
            Rejection(step=self._manifest.step, path=directory, reason="; ".join(problems))
            for directory, problems in self._problems.items()
        ]

    def _lost_files(self) -> set[str]:
        """Files that have no place left to be read from."""
        return {
            self._spans[number].file
            for number, holder in zip(self.pending, self._assigned, strict=True)
            if holder is None
        }

    def raise_silence(self) -> None:
        """Go back to no older checkpoint while all that is missing may be where nobody answers."""
        lost = self._lost_files()
        if lost <= self._silence.keys():
            reasons = dict.fromkeys(self._silence[name] for name in sorted(lost))
            raise CheckpointError("; ".join(reasons))

    def _nearest(self) -> str:
        return min((facts.distance, facts.directory) for facts in self._facts.values())[1]

    def result(self) -> HeldCheckpoint:
        """Everything was read."""
        used = [self._facts[owner.rank, owner.source] for owner in set(self._owners.values())]
        used.sort(key=lambda facts: (facts.distance, facts.directory))
        return HeldCheckpoint(
            path=self._nearest(),
            manifest=self._manifest,
            sources=tuple(dict.fromkeys(facts.directory for facts in used)),
            tiers=tuple(dict.fromkeys(facts.tier for facts in used)),
            bytes_read=self._num_bytes,
            read_s=self._read_s,
            ranks=self._ranks,
            spans=self._spans,
            owners=tuple(self._owners[number].rank for number in range(len(self._spans))),
            contents=self._contents,
        )
