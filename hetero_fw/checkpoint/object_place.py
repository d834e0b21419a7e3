"""Keep the checkpoints of one attempt on an object store.

An attempt begins with `claim`: it fences the attempts before it and records which of their
checkpoints it accepts (`object_versions` tells what that means). From then on

- what a fenced attempt puts is not accepted, so that it never was a checkpoint;
- a fenced attempt deletes nothing: it looks for a later attempt before each deletion, and touches
  exactly named objects of the version it has decided on, the manifest first;
- a checkpoint that was reported as published is never lost to a later attempt: that looks for
  checkpoints after it has put its fence, and the one that publishes looks for fences after it has
  put its manifest, so that one of the two sees the other.

This rests on what object stores promise today: an object that was put is seen by every listing
and read that begins afterwards, and an object is put whole or not at all. One gap cannot be closed
without conditional deletes: an attempt that is stopped between its look and the deletion itself
deletes what it had decided on when it goes on. Retention has decided then that at least two newer
checkpoints made it superfluous.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from upath import UPath

from hetero_fw.checkpoint.catalog import CheckpointInfo, info_of
from hetero_fw.checkpoint.directories import parse_name, version_name
from hetero_fw.checkpoint.hashing import HashAlgorithm, new_hasher
from hetero_fw.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from hetero_fw.checkpoint.object_store import ObjectStore
from hetero_fw.checkpoint.object_versions import (
    ATTEMPTS,
    Snapshot,
    Version,
    fence_key,
    newest_attempt,
    record_key,
    record_text,
    take_snapshot,
)
from hetero_fw.checkpoint.pruning import (
    Decide,
    PruneReport,
    exceeds,
    is_enough,
    nothing_to_delete,
    retention_facts,
    unfinished,
    unreadable_note,
)
from hetero_fw.checkpoint.quarantine import read_quarantine
from hetero_fw.checkpoint.read_back import NOTHING_READ, GoOn, Intact, always, read_newest
from hetero_fw.checkpoint.save_point import OnPoint, SavePoint, pass_by
from hetero_fw.checkpoint.shard_file import WrittenShard, hash_chunks
from hetero_fw.checkpoint.shard_layout import ShardLayout
from hetero_fw.checkpoint.sources import PATIENCE_S, patiently
from hetero_fw.checkpoint.storage import StorageError, is_object_store, open_root
from hetero_fw.errors import CheckpointError
from hetero_fw.policies import RetentionRule, decide_retention

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Save(Protocol):
    """What a place needs to know of a save."""

    @property
    def name(self) -> str:
        """Of the checkpoint: `<prefix>-step-00000500`."""

    @property
    def step(self) -> int:
        """Optimizer steps completed."""

    @property
    def token(self) -> str:
        """Letters and digits, unlike any other save's of the attempt, the same on all ranks."""

    @property
    def hash(self) -> HashAlgorithm:
        """What files and chunks are hashed with."""

    @property
    def on_point(self) -> OnPoint:
        """Called at every point that the save passes."""


@dataclass(frozen=True, kw_only=True)
class ObjectPlace:
    """Where `attempt` keeps its checkpoints on a remote storage. Plain data until it is used.

    It can be pickled and used in another process, also after a fork. Its text does not show
    `options`.

    Attributes:
        url: directory of the checkpoints of one run, such as s3://bucket/runs/mine.
        options: for the file system's constructor.

    Every method raises a CheckpointError where the storage refuses or does not answer; if it is a
    StorageError, `is_transient` tells whether trying again may help.
    """

    url: str
    attempt: int
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)

    @classmethod
    def at(cls, root: UPath, attempt: int) -> ObjectPlace:
        """The place of an attempt at a root that is open already."""
        return cls(url=str(root), attempt=attempt, options=dict(root.storage_options))

    @property
    def root(self) -> UPath:
        root = open_root(self.url, self.options)
        assert is_object_store(root), self.url
        return root

    def location(self, save: Save) -> UPath:
        """Directory of a save, whether or not it is published."""
        return self.root / self._version_name(save)

    def claim(self, patience_s: float = PATIENCE_S) -> None:
        """Begin the attempt: fence every older one, record what is accepted of theirs, clear up.

        Rank 0 alone calls this, once, before it looks for a checkpoint to restore. Each request is
        made again, for `patience_s` in all, if the storage does not answer properly.

        Raises:
            CheckpointError: this or a later attempt has begun already, so this one is stale.
        """
        store = ObjectStore(self.root)
        end_s = time.monotonic() + patience_s

        def patient(work: Callable[[], T]) -> T:
            return patiently(store.root, work, max(0.0, end_s - time.monotonic()))

        self._check_newest(patient(lambda: take_snapshot(store)).attempts)
        fence = {"attempt": self.attempt, "nonce": secrets.token_hex(16), "time_s": time.time()}
        try:
            content = json.dumps(fence).encode()
            patient(lambda: store.put_new(fence_key(self.attempt), content))
        except StorageError as error:
            raise StorageError(
                f"attempt {self.attempt} cannot begin: {error}", is_transient=error.is_transient
            ) from error
        # Everything that an older attempt has put and does not yet know to be fenced is seen here.
        seen = patient(lambda: take_snapshot(store))
        self._check_newest(seen.attempts - {self.attempt})
        names = [version.name for version in seen.checkpoints()]
        record = record_text(names).encode()
        patient(lambda: store.put(record_key(self.attempt), record))
        # Of two attempts that begin at once, the older one ends here or is fenced.
        self._check_newest(patient(lambda: take_snapshot(store)).attempts - {self.attempt})
        try:
            self._clear(store, seen, frozenset(names))
        except CheckpointError as error:
            logger.warning("what older attempts have left was not removed: %s", error)

    def remake(self) -> bool:
        return False  # a bucket is not ours to make

    def free_bytes(self) -> int | None:
        """None: object stores have no limit that they tell."""
        return None

    def fenced_by(self) -> int | None:
        """Number of the newest later attempt, None if there is none or the storage is silent."""
        try:
            return self._later_attempt(ObjectStore(self.root))
        except CheckpointError:
            return None

    def write_shard(self, save: Save, content: memoryview, layout: ShardLayout) -> WrittenShard:
        """Every rank: upload this rank's shard and hash it on the way."""
        save.on_point(SavePoint.WRITING_SHARD)
        store = ObjectStore(self.root)
        self._refuse_if_fenced(store)
        chunk_digests = hash_chunks(content, layout, save.hash)
        hasher = new_hasher(save.hash)

        def on_piece(piece: memoryview) -> None:
            save.on_point(SavePoint.SHARD_PIECE)
            hasher.update(piece)

        key = f"{self._version_name(save)}/{layout.file_name}"
        store.upload(key, content[: layout.size], on_piece)
        save.on_point(SavePoint.SHARD_WRITTEN)
        save.on_point(SavePoint.SHARD_SYNCED)  # the answer says that it is stored
        return WrittenShard(
            size=layout.size, digest=hasher.hexdigest(), chunk_digests=chunk_digests
        )

    def publish(self, save: Save, manifest: Manifest) -> None:
        """Rank 0, when every shard is uploaded: put the manifest, which makes it a checkpoint.

        Passes no MANIFEST_WRITTEN and no SET_ASIDE: the manifest is put where it stays, and an
        older version of the step stays until it is pruned.

        Raises:
            CheckpointError: it is not published, or a later attempt has begun, so that it does
                not count.
        """
        store = ObjectStore(self.root)
        version = self._stored(store, self._version_name(save))
        version.check_sizes(manifest)
        save.on_point(SavePoint.WRITING_MANIFEST)
        content = manifest.to_json().encode()
        save.on_point(SavePoint.PUBLISHING)
        self._refuse_if_fenced(store)
        store.put(f"{version.name}/{MANIFEST_NAME}", content)
        # Not only before: a later attempt that has looked already does not accept it.
        self._refuse_if_fenced(store)
        save.on_point(SavePoint.PUBLISHED)

    def withdraw(self, save: Save, manifest: Manifest) -> None:
        """Remove the manifest: the request that put it may have succeeded unheard.

        If it arrives even later, it names a shard that is not there and does not count as intact.
        """
        store = ObjectStore(self.root)
        self._refuse_if_fenced(store)
        store.delete([f"{self._version_name(save)}/{MANIFEST_NAME}"])

    def discard(self, save: Save, file_name: str) -> None:
        """Every rank, when a save failed: remove its part, as far as the storage allows."""
        name = self._version_name(save)
        with suppress(CheckpointError):
            store = ObjectStore(self.root)
            self._refuse_if_fenced(store)
            store.delete([f"{name}/{file_name}"])
            store.abort_uploads(lambda key: key == f"{name}/{file_name}")
            store.remove_folder(name)

    def prune(
        self,
        prefix: str,
        rule: RetentionRule,
        *,
        intact: Intact = NOTHING_READ,
        go_on: GoOn = always,
        on_point: OnPoint = pass_by,
        decide: Decide = decide_retention,
    ) -> PruneReport:
        """Rank 0: delete what `policies.decide_retention` gives up, and what is superseded.

        Args:
            prefix: first part of the checkpoints' names.
            rule: what to keep.
            intact: of the report of an earlier call; it is not read again.
            go_on: as `read_newest` takes it.
            on_point: called at every point that a deletion passes.
            decide: another policy, such as `policies.decide_room`.

        Raises:
            CheckpointError: the storage refuses, or a later attempt has begun.
        """
        store = ObjectStore(self.root)
        snapshot = take_snapshot(store)
        versions = snapshot.checkpoints(prefix)
        readable, whole = self._readable(versions)
        # Of several versions of a step, the newest whole one stands for it.
        chosen = {version.step: version for version in reversed(versions) if version in readable}
        chosen |= {version.step: version for version in reversed(versions) if version in whole}
        infos = {step: readable[version] for step, version in chosen.items()}
        is_complete = True
        if len(chosen) == len(versions) and not exceeds(len(chosen), rule, decide):
            decision = nothing_to_delete(len(chosen), rule)
        else:
            self._refuse_if_fenced(store)  # before all is read in vain
            found = [infos[version.step] for version in whole if version is chosen[version.step]]
            intact, is_complete = read_newest(found, intact, go_on)
            if not is_enough(intact, is_complete):
                return unfinished(intact)
            facts = [retention_facts(info, intact, rule) for info in infos.values()]
            decision = decide(facts, rule)
        gone = frozenset(decision.delete_steps)
        verified = {step for step, info in infos.items() if intact.holds(info)}
        # An older version goes first: it must not stand in for the newer one when that is gone.
        doomed = [
            version
            for version in reversed(versions)
            if version.step in gone
            or (version.step in verified and version is not chosen[version.step])
        ]
        for version in [*doomed, *self._unfinished(snapshot, prefix)]:
            on_point(SavePoint.RETIRING)
            self._delete(store, version, on_point)
        return PruneReport(
            deleted=tuple(self.root / chosen[step].name for step in decision.delete_steps),
            intact=intact.but(gone),
            reason=decision.reason + unreadable_note(len(versions) - len(readable)),
            rule=decision.rule,
            is_complete=is_complete,
        )

    def _version_name(self, save: Save) -> str:
        return version_name(save.name, self.attempt, save.token)

    def _stored(self, store: ObjectStore, name: str) -> Version:
        parsed = parse_name(name)
        assert parsed is not None, name
        objects = {key.partition("/")[2]: item for key, item in store.list(name).items()}
        return Version(
            name=name,
            prefix=parsed.prefix,
            step=parsed.step,
            attempt=self.attempt,
            objects=objects,
        )

    def _readable(
        self, versions: Collection[Version]
    ) -> tuple[dict[Version, CheckpointInfo], set[Version]]:
        """Those whose manifest can be read, and those of them whose files have their sizes."""
        readable: dict[Version, CheckpointInfo] = {}
        whole: set[Version] = set()
        quarantine = read_quarantine(self.root)
        for version in versions:
            path = self.root / version.name
            try:
                manifest = read_manifest(path)
                readable[version] = info_of(path, manifest, quarantine)
                version.check_sizes(manifest)
                whole.add(version)
            except StorageError as error:
                if not error.is_absent:
                    raise  # nothing is given up because the storage hiccups
            except CheckpointError:
                continue
        return readable, whole

    def _unfinished(self, snapshot: Snapshot, prefix: str) -> list[Version]:
        """Saves of this attempt that were given up. One that is under way is of a later step."""
        own = [v for v in snapshot.versions if v.attempt == self.attempt and v.prefix == prefix]
        newest_step = max((version.step for version in own if version.has_manifest), default=-1)
        return [v for v in own if not v.has_manifest and v.step < newest_step]

    def _clear(self, store: ObjectStore, seen: Snapshot, accepted: frozenset[str]) -> None:
        """Delete what older attempts have begun and never published, and their claims."""
        for version in seen.versions:
            if version.is_of_attempt_before(self.attempt) and version.name not in accepted:
                self._delete(store, version, pass_by)
        store.abort_uploads(self._is_of_older_attempt)
        claims = [
            key
            for attempt in seen.attempts
            if attempt < self.attempt
            for key in (fence_key(attempt), record_key(attempt))
        ]
        # One by one: a store without bulk deletion stops at the first that is not there.
        for key in sorted(set(claims) & store.list(ATTEMPTS).keys()):
            store.delete([key])

    def _is_of_older_attempt(self, key: str) -> bool:
        name = parse_name(key.partition("/")[0])
        return name is not None and name.attempt is not None and name.attempt < self.attempt

    def _delete(self, store: ObjectStore, version: Version, on_point: OnPoint) -> None:
        self._refuse_if_fenced(store)
        if version.has_manifest:
            store.delete([f"{version.name}/{MANIFEST_NAME}"])
        on_point(SavePoint.RETIRED)
        self._refuse_if_fenced(store)
        store.delete([key for key in version.keys if not key.endswith(f"/{MANIFEST_NAME}")])
        store.remove_folder(version.name)
        on_point(SavePoint.DELETED)

    def _later_attempt(self, store: ObjectStore) -> int | None:
        newest = newest_attempt(store)
        return newest if newest > self.attempt else None

    def _refuse_if_fenced(self, store: ObjectStore) -> None:
        later = self._later_attempt(store)
        if later is not None:
            raise CheckpointError(f"fenced by attempt {later}")

    def _check_newest(self, others: Collection[int]) -> None:
        newest = max(others, default=-1)
        if newest == self.attempt:
            raise CheckpointError(
                f"attempt {self.attempt} has begun before in {self.url}; every attempt needs a "
                "number of its own."
            )
        if newest > self.attempt:
            raise CheckpointError(
                f"attempt {self.attempt} is fenced by attempt {newest}, which keeps checkpoints in "
                f"{self.url}. If that is none of this run, delete {ATTEMPTS}/{newest:06d}.* there."
            )
