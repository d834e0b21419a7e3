"""Copies on their way from one node to another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetero_fw.checkpoint import HashAlgorithm
from hetero_fw.checkpoint.hashing import hexdigest
from hetero_fw.checkpoint.replicas import ReplicaAddress, ReplicaServer, send_copy
from hetero_fw.errors import CheckpointError

HOST = "127.0.0.1"
NAME = "shard-00000.bin"


@contextmanager
def receiver(staging: Path) -> Iterator[ReplicaAddress]:
    server = ReplicaServer(staging, host=HOST, secret="s")
    try:
        yield ReplicaAddress(node="b", host=HOST, port=server.port, secret="s")
    finally:
        server.close()


@pytest.mark.parametrize("algorithm", HashAlgorithm)
def test_a_copy_is_hashed_on_arrival(tmp_path: Path, algorithm: HashAlgorithm) -> None:
    content = bytes(range(256)) * 100
    digest = hexdigest(algorithm, content)
    with receiver(tmp_path) as address:

        def send(content: bytes) -> None:
            send_copy(
                address,
                memoryview(content),
                folder="step.1",
                file=NAME,
                algorithm=algorithm,
                digest=digest,
            )

        send(content)
        assert (tmp_path / "step.1" / NAME).read_bytes() == content
        told = rf"node b: {NAME} arrived with other bytes \({algorithm}\)"
        with pytest.raises(CheckpointError, match=told):
            send(content[:-1] + b"x")
        assert not (tmp_path / "step.1" / NAME).exists()
