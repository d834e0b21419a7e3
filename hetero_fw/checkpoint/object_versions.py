"""Which checkpoints an object store holds, by one look at it.

Nothing can be renamed there, so each save has a directory of its own, a version of its checkpoint:
`<prefix>-step-00000500.<attempt>-<token>/` with shards and, put last, `manifest.json`. And nothing
keeps a stale attempt from putting what it still has in hand, so that having a manifest is not
enough. Every attempt first fences the older ones with `.attempts/<attempt>.json`, then looks what
is there, and records that as what it accepts in `.attempts/<attempt>.accepts.json`. A version of
an older attempt counts only if it is accepted: whatever was put after the look never existed.

The newest record decides alone. Older records are part of it already, since what an attempt
accepts is what counted when it looked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hetero_fw.checkpoint.directories import parse_name
from hetero_fw.checkpoint.hashing import hexdigest
from hetero_fw.checkpoint.manifest import MANIFEST_NAME, OWN_HASH, Manifest
from hetero_fw.checkpoint.object_store import ObjectStore, StoredObject
from hetero_fw.checkpoint.storage import StorageError
from hetero_fw.errors import CheckpointError

ATTEMPTS = ".attempts"
_CLAIM = re.compile(rf"{re.escape(ATTEMPTS)}/(\d+)(\.accepts)?\.json")
# A record that is listed but gone when it is read was replaced by that of a newer attempt.
_MAX_LOOKS = 5


def fence_key(attempt: int) -> str:
    """The object that makes every attempt before this one stale."""
    return f"{ATTEMPTS}/{attempt:06d}.json"


def record_key(attempt: int) -> str:
    """The object that lists what an attempt accepts of those before it."""
    return f"{ATTEMPTS}/{attempt:06d}.accepts.json"


@dataclass(frozen=True, kw_only=True)
class Version:
    """One save of one step: a directory by its name, and the objects in it by theirs.

    Attributes:
        attempt: None if it was not made here, but copied from a file system. It counts then.
    """

    name: str
    prefix: str
    step: int
    attempt: int | None
    objects: Mapping[str, StoredObject] = field(repr=False, hash=False)

    @property
    def has_manifest(self) -> bool:
        return MANIFEST_NAME in self.objects

    @property
    def keys(self) -> list[str]:
        """Of its objects; the manifest first, so that it goes first."""
        names = sorted(self.objects, key=lambda name: (name != MANIFEST_NAME, name))
        return [f"{self.name}/{name}" for name in names]

    @property
    def age_order(self) -> tuple[int, int, float, str]:
        """Sorts versions: by step, and the later of two saves of a step behind the earlier."""
        manifest = self.objects.get(MANIFEST_NAME)
        attempt = -1 if self.attempt is None else self.attempt
        return self.step, attempt, manifest.modified if manifest else 0.0, self.name

    def is_of_attempt_before(self, attempt: int) -> bool:
        return self.attempt is not None and self.attempt < attempt

    def check_sizes(self, manifest: Manifest) -> None:
        """Compare the sizes in the listing with the manifest.

        Raises:
            CheckpointError: a file is missing or has another size. Names it.
        """
        for file in manifest.files:
            stored = self.objects.get(file.name)
            if stored is None:
                raise CheckpointError(f"{self.name}/{file.name}: is missing")
            if stored.size != file.size:
                raise CheckpointError(
                    f"{self.name}/{file.name}: has {stored.size} bytes, {file.size} were written"
                )


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a root held at one moment.

    Attributes:
        attempts: numbers of the attempts that have begun.
        recorded_by: the newest attempt with a record of what it accepts; None if there is none.
        accepted: names of versions in that record.
    """

    versions: tuple[Version, ...]
    attempts: frozenset[int]
    recorded_by: int | None
    accepted: frozenset[str]

    @property
    def newest_attempt(self) -> int:
        return max(self.attempts, default=-1)

    def counts(self, version: Version) -> bool:
        """Whether `version` is a checkpoint."""
        if not version.has_manifest:
            return False
        if self.recorded_by is None or not version.is_of_attempt_before(self.recorded_by):
            return True
        return version.name in self.accepted

    def checkpoints(self, prefix: str | None = None) -> list[Version]:
        """What counts, newest first; of all prefixes or of one."""
        found = [
            version
            for version in self.versions
            if prefix in (None, version.prefix) and self.counts(version)
        ]
        return sorted(found, key=lambda version: version.age_order, reverse=True)


def newest_attempt(store: ObjectStore) -> int:
    """Number of the newest attempt that has begun, -1 if there is none.

    Raises:
        StorageError: the storage does not say.
    """
    matches = [_CLAIM.fullmatch(key) for key in store.list(ATTEMPTS)]
    return max((int(match[1]) for match in matches if match is not None), default=-1)


def take_snapshot(store: ObjectStore) -> Snapshot:
    """Look at everything below the root of `store`.

    Raises:
        StorageError: the storage does not say.
        CheckpointError: a record of an attempt is not one.
    """
    for _ in range(_MAX_LOOKS):
        objects = store.list()
        claims = [match for key in objects if (match := _CLAIM.fullmatch(key))]
        recorded_by = max((int(match[1]) for match in claims if match[2]), default=None)
        accepted: frozenset[str] = frozenset()
        if recorded_by is not None:
            key = record_key(recorded_by)
            try:
                accepted = parse_record(store.read(key), key)
            except StorageError as error:
                if error.is_absent:
                    continue
                raise
        return Snapshot(
            versions=tuple(_versions(objects)),
            attempts=frozenset(int(match[1]) for match in claims),
            recorded_by=recorded_by,
            accepted=accepted,
        )
    raise StorageError(
        f"{store.root}: attempts begin faster than their records can be read", is_transient=True
    )


def record_text(names: list[str]) -> str:
    """The content of a record, with a hash of itself."""
    accepted = sorted(names)
    return json.dumps({"accepts": accepted, OWN_HASH.value: _record_hash(accepted)}, indent=1)


def parse_record(content: bytes, key: str) -> frozenset[str]:
    """The names in the content of a record.

    Raises:
        CheckpointError: it is none, or was changed.
    """
    try:
        record = json.loads(content)
        # A name that is garbled would make a checkpoint be none, and be deleted.
        if record.get(OWN_HASH.value) != _record_hash(record["accepts"]):
            raise ValueError("it does not match its own hash")
        return frozenset(record["accepts"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{key} is not a list of accepted checkpoints ({error}); without it nobody can tell "
            "which checkpoints of older attempts count. Delete it to accept all of them."
        ) from error


def _record_hash(accepted: list[str]) -> str:
    return hexdigest(OWN_HASH, json.dumps(accepted).encode())


def _versions(objects: Mapping[str, StoredObject]) -> Iterator[Version]:
    by_folder: dict[str, dict[str, StoredObject]] = {}
    for key, stored in objects.items():
        folder, _, name = key.partition("/")
        if name:
            by_folder.setdefault(folder, {})[name] = stored
    for folder, content in by_folder.items():
        parsed = parse_name(folder)
        if parsed is not None:
            yield Version(
                name=folder,
                prefix=parsed.prefix,
                step=parsed.step,
                attempt=parsed.attempt,
                objects=content,
            )
