"""Copies of shards in the directories of other nodes, sent from writer to writer."""

from __future__ import annotations

import hmac
import json
import re
import socket
import socketserver
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from hetero_fw.checkpoint.directories import sync_directory
from hetero_fw.checkpoint.hashing import HashAlgorithm
from hetero_fw.checkpoint.shard_file import PIECE_BYTES, ShardSink
from hetero_fw.errors import CheckpointError

# A peer that neither takes nor sends a byte for so long is gone; deadlines of saves come on top.
SOCKET_TIMEOUT_S = 30.0
_MAX_HEADER_BYTES = 4096
_NAMES = {
    "folder": re.compile(r"[\w.-]{1,200}"),
    "file": re.compile(r"shard-\d{5}\.bin"),
}


@dataclass(frozen=True, kw_only=True)
class ReplicaAddress:
    """Where a rank of another node takes copies."""

    node: str
    host: str
    port: int
    secret: str


class ReplicaServer:
    """Takes copies into `staging`, the directory for unfinished saves of this node's attempt.

    Runs in threads of the process that makes it, and ends with that process. Whoever sends has
    to know the secret.
    """

    def __init__(self, staging: Path, *, host: str, secret: str) -> None:
        self.secret = secret
        self._server = _Server((host, 0), _Receiver, staging, secret)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], handler: Any, staging: Path, secret: str) -> None:
        super().__init__(address, handler)
        self.staging = staging
        self.secret = secret


class _Receiver(socketserver.StreamRequestHandler):
    timeout = SOCKET_TIMEOUT_S
    server: _Server

    def handle(self) -> None:
        try:
            header = _header(self.rfile, self.server.secret)
            self._receive(header)
            answer: dict[str, str] = {}
        except (OSError, ValueError, KeyError, CheckpointError) as error:
            answer = {"error": str(error) or repr(error)}
        try:
            self.wfile.write(json.dumps(answer).encode() + b"\n")
        except OSError:
            return  # the sender is gone and has failed already

    def _receive(self, header: Mapping[str, Any]) -> None:
        folder = self.server.staging / header["folder"]
        # Without its parent: that is gone when a later attempt has begun.
        folder.mkdir(exist_ok=True)
        path = folder / header["file"]
        path.unlink(missing_ok=True)
        left, algorithm = int(header["size"]), HashAlgorithm(header["hash"])
        with ShardSink(path, algorithm) as sink:
            while left > 0:
                piece = self.rfile.read(min(left, PIECE_BYTES))
                if not piece:
                    raise CheckpointError("the sender ended before its shard did")
                sink.write(memoryview(piece))
                left -= len(piece)
            digest = sink.finish()
        if digest != header["digest"]:
            path.unlink(missing_ok=True)
            raise CheckpointError(f"{header['file']} arrived with other bytes ({algorithm})")
        sync_directory(folder)


def _header(stream: BufferedIOBase, secret: str) -> dict[str, Any]:
    line = stream.readline(_MAX_HEADER_BYTES)
    header = json.loads(line)
    if not hmac.compare_digest(str(header["secret"]), secret):
        raise CheckpointError("the sender does not know the secret of this run")
    for key, pattern in _NAMES.items():
        if pattern.fullmatch(str(header[key])) is None or header[key] in (".", ".."):
            raise CheckpointError(f"{header[key]!r} is no name of a {key}")
    return dict(header)


def send_copy(
    address: ReplicaAddress,
    content: memoryview,
    *,
    folder: str,
    file: str,
    algorithm: HashAlgorithm,
    digest: str,
) -> None:
    """Bring `content` to the other node and wait until it is on that node's storage.

    Raises:
        CheckpointError: names the node and says why it has no copy.
    """
    header = {
        "secret": address.secret,
        "folder": folder,
        "file": file,
        "size": len(content),
        "hash": algorithm,
        "digest": digest,
    }
    try:
        with socket.create_connection((address.host, address.port), SOCKET_TIMEOUT_S) as sock:
            sock.sendall(json.dumps(header).encode() + b"\n")
            for start in range(0, len(content), PIECE_BYTES):
                sock.sendall(content[start : start + PIECE_BYTES])
            with sock.makefile("rb") as stream:
                line = stream.readline(_MAX_HEADER_BYTES)
        answer = json.loads(line) if line else {"error": "it closed the connection"}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"no copy on node {address.node}: {error}") from error
    if "error" in answer:
        raise CheckpointError(f"no copy on node {address.node}: {answer['error']}")
