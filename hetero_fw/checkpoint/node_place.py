"""Checkpoints in directories of the nodes themselves, every part on several nodes."""

from __future__ import annotations

import secrets
import shutil
from dataclasses import dataclass, replace

from hetero_fw.checkpoint.catalog import list_checkpoints
from hetero_fw.checkpoint.commit import SaveSpec
from hetero_fw.checkpoint.manifest import Manifest
from hetero_fw.checkpoint.place import DirectoryPlace
from hetero_fw.checkpoint.pruning import Decide, PruneReport, retire_by_rule
from hetero_fw.checkpoint.read_back import NOTHING_READ, GoOn, Intact, always
from hetero_fw.checkpoint.replicas import ReplicaAddress, ReplicaServer, send_copy
from hetero_fw.checkpoint.save_point import OnPoint, pass_by
from hetero_fw.checkpoint.save_tasks import OnProgress
from hetero_fw.checkpoint.shard_file import WrittenShard
from hetero_fw.checkpoint.shard_layout import ShardLayout
from hetero_fw.policies import RetentionRule, decide_retention


@dataclass(frozen=True, kw_only=True)
class NodePlace(DirectoryPlace):
    """This node's directory. Each rank's part goes to it and to those of `peers`.

    A checkpoint is complete where the directories of all nodes together hold every file; each has
    a copy of the manifest.

    Attributes:
        node: name of this node.
        files: shard files that this node holds of every checkpoint, its own and copies.
        peers: where copies of this rank's part go in the save at hand.
    """

    node: str
    files: tuple[str, ...]
    peers: tuple[ReplicaAddress, ...] = ()

    def write_shard(self, spec: SaveSpec, content: memoryview, layout: ShardLayout) -> WrittenShard:
        written = super().write_shard(spec, content, layout)
        for peer in self.peers:
            send_copy(
                peer,
                content[: layout.size],
                folder=self.unpublished(spec).name,
                file=layout.file_name,
                algorithm=spec.hash,
                digest=written.digest,
            )
        return written

    def publish(self, spec: SaveSpec, manifest: Manifest) -> None:
        self._clear_leftovers(spec)
        self.publish_directory(spec, manifest, self.files)

    def _clear_leftovers(self, spec: SaveSpec) -> None:
        """Remove copies that came for an earlier save after it had failed here.

        No rank begins another save to this tier before every node has published this one.
        """
        for path in self.directories.staging.iterdir():
            if path != self.unpublished(spec):
                shutil.rmtree(path, ignore_errors=True)

    def discard(self, spec: SaveSpec, file_name: str) -> None:
        for name in {file_name, *self.files}:
            super().discard(spec, name)

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
        """As for any place, but for what this attempt has committed there is no second reading.

        One node cannot verify a checkpoint of which it holds a part; every part was hashed when
        it was staged, and again by the node that took the copy.
        """
        return retire_by_rule(
            list_checkpoints(self.directories.root, prefix),
            rule,
            into=self.directories.retired,
            intact=intact,
            on_point=on_point,
            decide=decide,
        )

    def sending_to(self, peers: tuple[ReplicaAddress, ...]) -> NodePlace:
        return replace(self, peers=peers)


# One for each directory, in the process that runs the tasks: the rank's writer, or the rank.
_SERVERS: dict[str, ReplicaServer] = {}


@dataclass(frozen=True, kw_only=True)
class TakeCopies:
    """Take copies of other nodes' parts from now on; returns the address."""

    place: NodePlace
    host: str

    def __call__(self, content: memoryview, on_progress: OnProgress) -> ReplicaAddress:
        staging = self.place.directories.staging
        server = _SERVERS.get(str(staging))
        if server is None:
            server = ReplicaServer(staging, host=self.host, secret=secrets.token_hex(16))
            _SERVERS[str(staging)] = server
        return ReplicaAddress(
            node=self.place.node, host=self.host, port=server.port, secret=server.secret
        )
