"""Where an attempt puts its checkpoints: what every kind of storage has to be able to do."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hetero_fw.checkpoint.directories import publish, retire, sync_directory
from hetero_fw.checkpoint.fencing import AttemptDirectories, claim_attempt, fenced_by, remake
from hetero_fw.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from hetero_fw.checkpoint.pruning import Decide, PruneReport, prune
from hetero_fw.checkpoint.read_back import NOTHING_READ, GoOn, Intact, always
from hetero_fw.checkpoint.save_point import OnPoint, SavePoint, pass_by
from hetero_fw.checkpoint.shard_file import WrittenShard, write_shard, write_text
from hetero_fw.checkpoint.shard_layout import ShardLayout
from hetero_fw.checkpoint.sources import PATIENCE_S
from hetero_fw.checkpoint.storage import StoragePath
from hetero_fw.errors import CheckpointError
from hetero_fw.policies import RetentionRule, decide_retention

if TYPE_CHECKING:
    from hetero_fw.checkpoint.commit import SaveSpec


class Place(Protocol):
    """Storage of one attempt's checkpoints. Plain data: the writer's process gets a copy of it.

    Every method may block as long as the storage does; whoever calls has a deadline of its own.
    """

    def claim(self, patience_s: float = PATIENCE_S) -> None:
        """Begin the attempt: fence every older one and clear up behind it. One rank, once, first.

        Args:
            patience_s: how long to try again while the storage does not answer properly; an
                attempt that ends here has made no progress, and the run has few of these.

        Raises:
            CheckpointError: this or a later attempt has begun already, or the storage refuses.
        """

    def location(self, spec: SaveSpec) -> StoragePath:
        """Where the checkpoint is once it is published."""

    def write_shard(self, spec: SaveSpec, content: memoryview, layout: ShardLayout) -> WrittenShard:
        """Every rank: bring this rank's shard to storage, not yet as part of a checkpoint.

        May be called again after it failed.

        Raises:
            OSError: a local storage refuses it, and so in the other methods.
            StorageError: a remote one does.
        """

    def publish(self, spec: SaveSpec, manifest: Manifest) -> None:
        """Make the checkpoint exist, once every shard is on storage.

        Raises:
            OSError: the storage refuses it; the checkpoint does not exist.
            CheckpointError: a shard is not as it was reported.
        """

    def discard(self, spec: SaveSpec, file_name: str) -> None:
        """Every rank, when a save failed: remove its part, unless published. Never raises."""

    def withdraw(self, spec: SaveSpec, manifest: Manifest) -> None:
        """Whoever has published a save that failed: make it exist no more, if it does.

        Raises:
            OSError: the storage refuses it.
            CheckpointError: it does not tell what is there.
        """

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
        """Delete what the rule gives up, as `decide` understands it.

        Raises:
            OSError: the storage refuses it.
        """

    def remake(self) -> bool:
        """Make a place that is gone again, empty; False where that cannot be or is not safe."""

    def free_bytes(self) -> int | None:
        """Room for more; None where there is no limit, or the storage does not say."""

    def fenced_by(self) -> int | None:
        """Number of a later attempt that has taken the storage over, None if there is none."""


@dataclass(frozen=True, kw_only=True)
class DirectoryPlace:
    """A directory on a file system that all ranks see, with atomic renames, as POSIX has them.

    Attributes:
        directories: of the attempt.
        attempts: as `fencing.remake` takes it; None: what is gone stays gone.
    """

    directories: AttemptDirectories
    attempts: Path | None = None

    def claim(self, patience_s: float = PATIENCE_S) -> None:
        claim_attempt(self.directories.root, self.directories.attempt, patience_s)

    def location(self, spec: SaveSpec) -> Path:
        return self.directories.root / spec.name

    def write_shard(self, spec: SaveSpec, content: memoryview, layout: ShardLayout) -> WrittenShard:
        spec.on_point(SavePoint.WRITING_SHARD)
        temporary = self.unpublished(spec)
        # Without its parent: that is gone when a later attempt has begun.
        temporary.mkdir(exist_ok=True)
        path = temporary / layout.file_name
        path.unlink(missing_ok=True)  # what an earlier try has left
        written = write_shard(path, content, layout, spec.hash, spec.on_point)
        sync_directory(temporary)
        spec.on_point(SavePoint.SHARD_SYNCED)
        return written

    def publish(self, spec: SaveSpec, manifest: Manifest) -> None:
        # On a network file system this rank must see what the others wrote.
        self.publish_directory(spec, manifest, [file.name for file in manifest.files])

    def publish_directory(self, spec: SaveSpec, manifest: Manifest, files: Collection[str]) -> None:
        """Write the manifest and rename what this directory holds of the checkpoint.

        Args:
            files: that it holds.

        Raises:
            CheckpointError: one of them has another size than the manifest says.
            OSError: one of them is not there, or the file system refuses.
        """
        temporary = self.unpublished(spec)
        sizes = {file.name: file.size for file in manifest.files}
        for name in files:
            size = (temporary / name).stat().st_size
            if size != sizes[name]:
                raise CheckpointError(
                    f"{temporary / name} has {size} bytes, its rank wrote {sizes[name]}"
                )
        spec.on_point(SavePoint.WRITING_MANIFEST)
        (temporary / MANIFEST_NAME).unlink(missing_ok=True)  # what an earlier try has left
        write_text(temporary / MANIFEST_NAME, manifest.to_json())
        sync_directory(temporary)
        spec.on_point(SavePoint.MANIFEST_WRITTEN)
        publish(
            temporary,
            self.location(spec),
            retired=self.directories.retired,
            token=spec.token,
            on_point=spec.on_point,
        )

    def withdraw(self, spec: SaveSpec, manifest: Manifest) -> None:
        path = self.location(spec)
        # The step may be there from an earlier save, which this one was to replace.
        if path.exists() and read_manifest(path).is_of_same_save(manifest):
            retire(path, into=self.directories.retired, token=secrets.token_hex(4))

    def discard(self, spec: SaveSpec, file_name: str) -> None:
        temporary = self.unpublished(spec)
        for name in (file_name, MANIFEST_NAME):
            _unlink(temporary / name)
        try:
            temporary.rmdir()
        except OSError:
            return  # shards of other ranks are still there, or there was no directory

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
        return prune(
            self.directories.root,
            prefix,
            rule,
            into=self.directories.retired,
            intact=intact,
            go_on=go_on,
            on_point=on_point,
            decide=decide,
        )

    def remake(self) -> bool:
        return self.attempts is not None and remake(self.directories, self.attempts)

    def free_bytes(self) -> int | None:
        try:
            return shutil.disk_usage(self.directories.root).free
        except OSError:
            return None

    def fenced_by(self) -> int | None:
        return fenced_by(self.directories)

    def unpublished(self, spec: SaveSpec) -> Path:
        """Where the checkpoint is until it is published."""
        return self.directories.staging / f"{spec.name}.{spec.token}"


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # the next attempt removes the whole directory
